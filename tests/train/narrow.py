"""A ResNet-18 of an eighth of the width, for tests of what surrounds the network: its runs cost a tenth.

Layers, names and batch norms are torchvision's, but for one more downsampling behind the stem.
"""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from torch import nn
from torchvision.models import resnet
from torchvision.models._api import BUILTIN_MODELS


class _Narrow(resnet.ResNet):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__(resnet.BasicBlock, [2, 2, 2, 2])
        self.fc = nn.Linear(self.inplanes, 1000)

    def _make_layer(self, block: Any, planes: int, *arguments: Any, **options: Any) -> nn.Sequential:
        layer: nn.Sequential = super()._make_layer(block, planes // 8, *arguments, **options)
        return layer


@functools.wraps(resnet.resnet18)  # torchvision reads from the signature which weights there are
def _build(*, weights: None = None) -> nn.Module:
    return _Narrow()


@contextmanager
def narrow_resnet18() -> Iterator[None]:
    """Meanwhile "resnet18" is the narrow one, in this process."""
    with patch.dict(BUILTIN_MODELS, resnet18=_build):
        yield


@contextmanager
def full_resnet18() -> Iterator[None]:
    """Within `narrow_resnet18`, torchvision's own."""
    with patch.dict(BUILTIN_MODELS, resnet18=resnet.resnet18):
        yield
