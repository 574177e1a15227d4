"""Lightning saves the loader's state and gives it back: a run that is killed sees what a whole one sees."""

import hashlib
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.precision import DoublePrecision
from torch import Tensor, nn

from peclr_dali import Batch, EpochLoader, GeometryConfig, PipelinesConfig, View, make_loader
from tests.pipelines.harness import write_jpegs

EPOCHS, STEPS_PER_EPOCH, BATCH = 4, 4, 6
Rows = dict[int, tuple[int, str]]
pytestmark = pytest.mark.filterwarnings("ignore")  # Lightning's advice, and what it uses of torch that is deprecated


class _Killed(BaseException):
    pass


class Recorder(LightningModule):
    """Writes down each sample by its position: its row of the index, and a digest of its views.

    What was made before must be made again as it was. Each rank of the data is a run of its own; it ends by an
    exception in step `kill_at`, after the batch has been written down.
    """

    def __init__(self, images: Path, rows: Rows, rank: int, world_size: int, kill_at: int) -> None:
        super().__init__()
        self.images, self.rows, self.ranks, self.kill_at = images, rows, (rank, world_size), kill_at
        self.weight = nn.Parameter(torch.zeros(()))

    def train_dataloader(self) -> EpochLoader:
        rank, world_size = self.ranks
        small, config = GeometryConfig(side_px=16), PipelinesConfig(threads=2)
        self.loader = make_loader(
            self.images, batch=BATCH, seed=3, device="cpu", rank=rank, world_size=world_size, geometry=small,
            config=config,
        )  # fmt: skip
        return self.loader

    def training_step(self, batch: Batch, step: int) -> Tensor:
        for row, position in enumerate(batch.positions.tolist()):
            tensors = [tensor[row] for view in batch.views for tensor in vars(view).values()]
            digest = hashlib.sha256(b"".join(tensor.contiguous().numpy().tobytes() for tensor in tensors)).hexdigest()
            made = int(batch.samples[row, 0]), digest
            assert self.rows.setdefault(position, made) == made
        if self.global_step == self.kill_at:
            raise _Killed
        return self.weight**2

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(run: Path, module: Recorder, *, limit: int) -> bool:
    """Train up to `limit` steps of each epoch, from the run's last checkpoint on if there is one; rank 0 saves.

    Whether the run was killed.
    """
    saves, last = module.ranks[0] == 0, run / "last.ckpt"
    trainer = Trainer(
        max_steps=EPOCHS * limit,  # with max_epochs, Lightning 2.6 does not load every state
        limit_train_batches=limit,
        accelerator="cpu",
        callbacks=[ModelCheckpoint(run, save_last=True, save_top_k=0, every_n_train_steps=2)] * saves,
        enable_checkpointing=saves,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    try:
        trainer.fit(module, ckpt_path=last if last.exists() else None, weights_only=True)
    except _Killed:
        return True
    finally:
        module.loader.close()
    return False


@pytest.mark.parametrize("limit", [STEPS_PER_EPOCH, STEPS_PER_EPOCH - 1])  # Lightning then leaves each epoch early
def test_killed_runs_see_the_samples_of_an_uninterrupted_run(tmp_path: Path, limit: int) -> None:
    """Killed at ten random steps, each time on another number of ranks; every second step writes a checkpoint."""
    (tmp_path / "images").mkdir()
    images = Path(write_jpegs(tmp_path / "images", STEPS_PER_EPOCH * BATCH + 2).root)
    expected, rows = Rows(), Rows()
    assert not fit(tmp_path / "whole", Recorder(images, expected, 0, 1, -1), limit=limit)
    steps = [epoch * STEPS_PER_EPOCH + step for epoch in range(EPOCHS) for step in range(limit)]
    assert list(expected) == [step * BATCH + row for step in steps for row in range(BATCH)]

    kill_at = sorted(np.random.default_rng(0).choice(len(steps), 10, replace=False).tolist())
    for number, step in enumerate([*kill_at, -1]):
        world_size = (2, 3, 1)[number % 3]
        for rank in reversed(range(world_size)):  # rank 0 saves, so it comes last: all go on from the same checkpoint
            assert fit(tmp_path / "run", Recorder(images, rows, rank, world_size, step), limit=limit) == (step >= 0)
        seen = {position // BATCH for position in rows}
        assert seen == set(steps[: step + 1] if step >= 0 else steps), f"killed at {kill_at[: number + 1]}"
    assert rows == expected
    assert "loader" not in [thread.name for thread in threading.enumerate()]  # they would outlive the pictures


def test_lightning_converts_a_batch() -> None:
    """As it does with precision = "64-true": it writes into a copy of the dataclass."""
    view = View(torch.zeros(2, 3, 8, 8, dtype=torch.uint8), torch.ones(2, 2, 3), torch.ones(2, 2, 3))
    keypoints_px = np.ones((2, 21, 2), np.float32)
    batch = Batch((view, view), torch.arange(2)[:, None].expand(-1, 2), torch.arange(2), all_keypoints_px=keypoints_px)
    converted = DoublePrecision().convert_input(batch)
    assert isinstance(converted, Batch)
    assert converted.views[1].matrix.dtype == converted.keypoints_px(1).dtype == torch.float64
    assert batch.views[1].matrix.dtype == torch.float32
    assert converted.samples.dtype == torch.int64
    assert converted.all_keypoints_px is keypoints_px
