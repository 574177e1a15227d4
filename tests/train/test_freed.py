"""A run that has ended leaves nothing in memory: a study trains many in one process."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from peclr_dali.train.config.finetuning import FinetuneConfig
from peclr_dali.train.config.load import load_config
from peclr_dali.train.config.pretraining import Config
from peclr_dali.train.finetune import finetune
from peclr_dali.train.pretrain import pretrain
from peclr_dali.train.runs.folder import RunFolder
from peclr_dali.train.steps.training_state import TrainingState
from tests.train import tiny_hands, tiny_run

pytestmark = pytest.mark.usefixtures("narrow")


def in_memory() -> list[Any]:
    return [one for one in gc.get_objects() if issubclass(type(one), TrainingState)]


def check_freed(run: Callable[[Any], RunFolder], config: Any) -> None:
    gc.collect()
    before, frozen = len(in_memory()), gc.get_freeze_count()
    gc.disable()  # the network goes with the last reference to it, not at some later collection
    try:
        run(config)
        assert len(in_memory()) == before
    finally:
        gc.enable()
    assert gc.get_freeze_count() == frozen


def test_pretraining_is_freed(tmp_path: Path) -> None:
    tiny_run.write_images(tmp_path / "images")
    settings = tiny_run.settings(tmp_path / "images", tmp_path / "run", "train.epochs=1")
    check_freed(pretrain, load_config(Config, [], settings))


def test_fine_tuning_is_freed(tmp_path: Path) -> None:
    tiny_hands.write_hands(tmp_path / "hands", 12)
    settings = tiny_hands.settings(tmp_path / "hands", tmp_path / "run", "train.epochs=1")
    check_freed(finetune, load_config(FinetuneConfig, [], settings))
