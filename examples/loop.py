"""Run `.venv/bin/python -m examples.loop`: a training loop in plain PyTorch on the loader's views.

It draws pictures of coloured shapes, and trains a small network to find the two views of the same picture.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import cv2
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from peclr_dali import ColourConfig, GeometryConfig, make_loader


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
    """Draw, train, print."""
    args = options(__doc__, images=512, batch=64, epochs=8)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    network = small_network(dim=64).to(device)
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-3)
    geometry = GeometryConfig(side_px=48, rotation_deg=(-20, 20), scale=(0.8, 1.25))
    colour = ColourConfig(hue=(0.9, 1), saturation=(0.7, 1))
    with tempfile.TemporaryDirectory() as folder:
        draw_shapes(Path(folder), args.images)
        with make_loader(folder, batch=args.batch, geometry=geometry, colour=colour, device=device) as loader:
            for epoch in range(args.epochs):
                losses = []
                for batch in loader:
                    loss = info_nce(*(network(view.image / 255) for view in batch.views))
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
                    losses.append(loss.detach())
                print(f"epoch {epoch}: {len(loader)} steps, loss {torch.stack(losses).mean():.3f}")


if __name__ == "__main__":
    main()
