"""A run on a GPU waits for nothing between two rows of metrics. `test_gpu_step.py` asks the same of a single step."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from peclr_dali.pipelines.batch import Batch
from peclr_dali.train.pretrain import pretrain
from peclr_dali.train.runs.meter import Meter
from tests.train.tiny_run import STEPS, config_of, rows_of, write_images

ONE_ROW = (
    "train.device=cuda",
    "train.precision=fp32",
    "run.log_every=100",
    "run.checkpoint_every=100",
    "run.tensorboard=false",
)


@pytest.mark.gpu
@pytest.mark.usefixtures("narrow")
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize(("decoder", "views"), [("cpu", "cpu"), ("cpu", "gpu"), ("gpu", "gpu"), ("gpu", "dali")])
def test_nothing_waits_for_the_gpu_between_two_rows_of_metrics(
    decoder: str, views: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the second step to the last but one, in all threads. The loader's own wait, for an event, is allowed."""

    next_batch = Meter.next_batch

    def watched(meter: Meter[Any], batches: Iterator[Batch]) -> Batch:
        batch, step = next_batch(meter, batches), meter._run_steps + 1
        if step in (2, STEPS):
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("error" if step < STEPS else "default")
        return batch

    monkeypatch.setattr(Meter, "next_batch", watched)
    write_images(tmp_path / "images")
    try:
        where = (f"pipelines.decoder={decoder}", f"pipelines.views={views}")
        pretrain(config_of(tmp_path / "images", tmp_path / "run", *ONE_ROW, *where), "never")
    finally:
        torch.cuda.set_sync_debug_mode("default")
    (row,) = rows_of(tmp_path / "run")
    assert row["step"] == STEPS
