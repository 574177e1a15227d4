"""Run `.venv/bin/python -m examples.resume_lightning`: a Lightning run, stopped in mid-epoch and resumed.

Lightning saves the loader's state in its checkpoints, since the loader has `state_dict` and `load_state_dict`.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import cv2
import numpy as np
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.nn import functional as F

from peclr_dali import Batch, EpochLoader, GeometryConfig, make_loader


class Contrastive(LightningModule):
    """Learns to find the other view of the same picture."""

    def __init__(self, folder: Path, batch: int) -> None:
        super().__init__()
        self.folder, self.batch, self.network = folder, batch, small_network(dim=64)

    def train_dataloader(self) -> EpochLoader:
        """Make the loader with the trainer's ranks. Lightning does not always write them into the environment."""
        geometry, rank, ranks = GeometryConfig(side_px=64), self.trainer.global_rank, self.trainer.world_size
        return make_loader(
            self.folder, batch=self.batch, geometry=geometry, device=self.device, rank=rank, world_size=ranks
        )

    def training_step(self, batch: Batch, step: int) -> Tensor:
        """The loss of this rank's share."""
        one, other = (self.network(view.image / 255) for view in batch.views)
        loss = info_nce(one, other)
        print(f"epoch {self.current_epoch}, step {step}: images {batch.samples[:4, 0].tolist()}..., loss {loss:.3f}")
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Use Adam."""
        return torch.optim.Adam(self.network.parameters(), lr=1e-3)


def draw_shapes(folder: Path, count: int, side_px: int = 96) -> None:
    """Pictures of a few filled polygons each."""
    rng = np.random.default_rng(0)
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(count):
        picture = np.full((side_px, side_px, 3), rng.integers(0, 256, 3), np.uint8)
        for _ in range(5):
            corners = rng.integers(0, side_px, (rng.integers(3, 7), 2))
            cv2.fillPoly(picture, [corners.astype(np.int32)], rng.integers(0, 256, 3).tolist())
        cv2.imwrite(str(folder / f"{number:04}.png"), picture)


def small_network(dim: int) -> nn.Module:
    """A network that maps pictures (N, 3, S, S) in [0, 1] to embeddings (N, dim)."""
    layers: list[nn.Module] = []
    for before, after in ((3, 32), (32, 64), (64, 128)):
        layers += [nn.Conv2d(before, after, 3, stride=2, padding=1), nn.BatchNorm2d(after), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(512, dim))


def info_nce(one: Tensor, other: Tensor, temperature: float = 0.2) -> Tensor:
    """The loss InfoNCE: cross-entropy of finding row i of `other` from row i of `one`, both (N, D)."""
    likeness = F.normalize(one) @ F.normalize(other).T / temperature
    return F.cross_entropy(likeness, torch.arange(len(one), device=one.device))


def options(description: str | None, **defaults: int | Path) -> argparse.Namespace:
    """The options of an example: numbers and paths, with their defaults."""
    parser = argparse.ArgumentParser(description=description)
    for name, default in defaults.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(default), default=default)
    return parser.parse_args()


def main() -> None:
    """Train up to a step within the second epoch; then train on from the checkpoint."""
    args = options(__doc__, images=512, batch=64)
    epoch = args.images // args.batch
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        draw_shapes(folder / "images", args.images)
        for last_step in (epoch + epoch // 2, 3 * epoch):  # with max_epochs, Lightning 2.6 does not load every state
            saving = ModelCheckpoint(folder / "saved", save_last=True, every_n_train_steps=1)
            trainer = Trainer(max_steps=last_step, callbacks=[saving], logger=False, enable_progress_bar=False)
            saved = folder / "saved" / "last.ckpt"
            trainer.fit(Contrastive(folder / "images", args.batch), ckpt_path=saved if saved.exists() else None)
            print(f"stopped after step {trainer.global_step}")


if __name__ == "__main__":
    main()
