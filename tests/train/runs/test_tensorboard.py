import importlib
from pathlib import Path

import pytest

from peclr_dali.train.pretrain import pretrain
from tests.train.tiny_run import config_of, rows_of


@pytest.mark.usefixtures("narrow")
def test_tensorboard_has_the_rows_of_a_resumed_run(images: Path, tmp_path: Path) -> None:
    config = config_of(images, tmp_path / "run", "train.epochs=2", "run.checkpoint_every=4")
    pretrain(config)
    (tmp_path / "run" / "checkpoints" / "step_000000008.pt").unlink()
    pretrain(config, "auto")
    accumulator = importlib.import_module("tensorboard.backend.event_processing.event_accumulator")
    board = accumulator.EventAccumulator(str(tmp_path / "run" / "tensorboard")).Reload()
    for name in ("loss", "lr", "images_per_s"):
        shown = {event.step: event.value for event in board.Scalars(name)}
        assert shown == pytest.approx({row["step"]: row[name] for row in rows_of(tmp_path / "run")})
