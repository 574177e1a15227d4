from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.train.narrow import narrow_resnet18


@pytest.fixture(scope="module")
def narrow() -> Iterator[None]:
    """For a module's tests and fixtures "resnet18" has an eighth of the width, as `tests.train.ranks` has it."""
    with narrow_resnet18():
        yield
