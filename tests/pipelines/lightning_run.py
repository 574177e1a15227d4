"""A Lightning run that writes down what its rank gets, and ends in the middle of a step."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import signal
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn

from peclr_dali import Batch, EpochLoader, GeometryConfig, PipelinesConfig, make_loader

EPOCHS, STEPS_PER_EPOCH, BATCH = 4, 4, 6
Stop = Callable[[], None]


class Recorder(LightningModule):
    """Writes a line for each sample: its position, its row of the index, and a digest of its views.

    Args:
        images: a folder of them.
        rows: the file to append to.
        rank: of the data; each rank is a run of its own here.
        world_size: ranks of the data.
        kill_at: calls `stop` in this step of the run, after the batch has been written down.
        stop: ends the run.
    """

    def __init__(self, images: Path, rows: Path, rank: int, world_size: int, kill_at: int, stop: Stop) -> None:
        super().__init__()
        self.images, self.rows, self.ranks = images, rows, (rank, world_size)
        self.kill_at, self.stop = kill_at, stop
        self.weight = nn.Parameter(torch.zeros(()))

    def train_dataloader(self) -> EpochLoader:
        return make_loader(
            self.images,
            batch=BATCH,
            seed=3,
            device="cpu",
            rank=self.ranks[0],
            world_size=self.ranks[1],
            geometry=GeometryConfig(side_px=16),
            config=PipelinesConfig(threads=2),
        )

    def training_step(self, batch: Batch, step: int) -> Tensor:
        with self.rows.open("a") as file:
            for row, position in enumerate(batch.positions.tolist()):
                digest = hashlib.sha256()
                for view in batch.views:
                    for tensor in (view.image, view.matrix, view.source_to_view_px):
                        digest.update(tensor[row].contiguous().numpy().tobytes())
                file.write(json.dumps([position, int(batch.samples[row, 0]), digest.hexdigest()]) + "\n")
        if self.global_step == self.kill_at:
            self.stop()
        return self.weight**2

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(run: Path, module: Recorder, *, save_every: int, limit: int = STEPS_PER_EPOCH) -> None:
    """Train up to `limit` steps of each epoch, from the run's last checkpoint on if there is one; rank 0 saves."""
    saver = ModelCheckpoint(run, save_last=True, save_top_k=0, every_n_train_steps=save_every)
    last = run / "last.ckpt"
    trainer = Trainer(
        max_steps=EPOCHS * limit,  # with max_epochs, Lightning 2.6 does not load every state; docs/library.md says when
        limit_train_batches=limit,
        accelerator="cpu",
        callbacks=[saver] if module.ranks[0] == 0 else [],
        enable_checkpointing=module.ranks[0] == 0,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, ckpt_path=last if last.exists() else None, weights_only=True)


def main(images: Path, run: Path, rank: int, world_size: int, kill_at: int) -> None:
    """One rank, in a process of its own, which ends as the kernel ends it where memory runs out."""
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)

    def killed() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    fit(run, Recorder(images, run / f"rows_{rank}.jsonl", rank, world_size, kill_at, killed), save_every=2)
