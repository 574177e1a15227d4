"""A run that has ended leaves nothing in memory: a study trains many in one process."""

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from peclr_dali.train.finetune import finetune
from peclr_dali.train.pretrain import pretrain
from peclr_dali.train.runs.folder import RunFolder
from peclr_dali.train.steps.train_state import TrainState
from tests.train import tiny_hands, tiny_run

pytestmark = pytest.mark.usefixtures("narrow")


def in_memory() -> list[Any]:
    return [one for one in gc.get_objects() if issubclass(type(one), TrainState)]


@pytest.mark.parametrize("run", [pretrain, finetune])
def test_a_run_is_freed(run: Callable[[Any], RunFolder], images: Path, hands: Path, tmp_path: Path) -> None:
    tiny, data = (tiny_run, images) if run is pretrain else (tiny_hands, hands)
    config = tiny.config_of(data, tmp_path / "run", "train.epochs=1")
    gc.collect()
    before, frozen = len(in_memory()), gc.get_freeze_count()
    gc.disable()  # the network goes with the last reference to it, not at some later collection
    try:
        run(config)
        assert len(in_memory()) == before
    finally:
        gc.enable()
    assert gc.get_freeze_count() == frozen
