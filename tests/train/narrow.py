"""A ResNet-18 of an eighth of the width, for tests of what surrounds the network: its runs cost a tenth.

Layers, names and batch norms are those of a ResNet-18, but for one more downsampling behind the stem.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

from models.resnet import ResNet


class _Narrow(ResNet):
    layer1_width = 8


@contextmanager
def narrow_resnet18() -> Iterator[None]:
    """Meanwhile "resnet18" is the narrow one, in this process."""
    with patch("models.resnet.ResNet", lambda name: (_Narrow if name == "resnet18" else ResNet)(name)):
        yield


@contextmanager
def full_resnet18() -> Iterator[None]:
    """Within `narrow_resnet18`, the full one."""
    with patch("models.resnet.ResNet", ResNet):
        yield
