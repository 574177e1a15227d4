from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.train import tiny_hands, tiny_run
from tests.train.narrow import narrow_resnet18


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Images of tiny pre-training runs."""
    return tiny_run.write_images(tmp_path_factory.mktemp("data") / "images")


@pytest.fixture(scope="module")
def hands(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twelve labelled hands of tiny fine-tuning runs."""
    return tiny_hands.write_hands(tmp_path_factory.mktemp("data") / "hands", 12)


@pytest.fixture(scope="module")
def narrow() -> Iterator[None]:
    """For a module's tests and fixtures "resnet18" has an eighth of the width, as `tests.train.ranks` has it."""
    with narrow_resnet18():
        yield
