"""Run `.venv/bin/python -m examples.leaves`: equivariance on pictures of leaves. An embedding turns with its leaf.

An embedding is a set of points in the plane. The loss undoes each view's matrix on these points, so the network learns
to turn them with the leaf. The program prints how often the nearest embedding belongs to the other view of the same
leaf, with the matrices undone and not undone.
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

from peclr_dali import ColourConfig, GeometryConfig, make_loader, undo_view


def draw_leaves(folder: Path, count: int, side_px: int = 128) -> None:
    """Pictures of lobed leaves with a vein on grey ground. Shape and angle of each leaf are random."""
    rng = np.random.default_rng(0)
    folder.mkdir(parents=True, exist_ok=True)
    angle = np.linspace(-np.pi, np.pi, 200)
    for number in range(count):
        lobes, depth, width = rng.integers(2, 8), rng.uniform(0, 0.4), rng.uniform(0.3, 1)
        radius = 0.25 * side_px * (1 + depth * np.cos(lobes * angle)) * (1 + 0.6 * np.cos(angle))  # one end is the tip
        outline = radius * (np.cos(angle) + 1j * width * np.sin(angle)) * np.exp(2j * np.pi * rng.random())  # x + i y
        picture = np.full((side_px, side_px, 3), rng.integers(90, 160), np.uint8)
        corners = (np.stack([outline.real, outline.imag], axis=1) + side_px / 2).astype(np.int32)
        cv2.fillPoly(picture, [corners], (40, int(rng.integers(90, 200)), int(rng.integers(30, 200))))
        cv2.line(picture, corners[0].tolist(), corners[100].tolist(), (230, 230, 230), 2)
        cv2.imwrite(str(folder / f"{number:04}.png"), picture)


def found(one: Tensor, other: Tensor) -> float:
    """Share of the rows i for which row i of `other` is the nearest to row i of `one`."""
    nearest = (F.normalize(one) @ F.normalize(other).T).argmax(dim=1)
    return float((nearest == torch.arange(len(one), device=one.device)).float().mean())


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
    """Draw, train, compare."""
    args = options(__doc__, images=512, batch=64, epochs=12)
    network = small_network(dim=64)
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-3)
    geometry = GeometryConfig(side_px=48, rotation_deg=(-180, 180), scale=(0.8, 1.2))
    colour = ColourConfig(hue=(0.9, 1), saturation=(0.8, 1))
    with tempfile.TemporaryDirectory() as name:
        draw_leaves(Path(name), args.images)
        with make_loader(name, batch=args.batch, geometry=geometry, colour=colour, device="cpu") as loader:
            for epoch in range(args.epochs):
                figures = []
                for batch in loader:
                    points = [network(view.image / 255) for view in batch.views]  # (N, 64): 32 points
                    undone = [undo_view(z, view.matrix) for z, view in zip(points, batch.views, strict=True)]
                    loss = info_nce(undone[0], undone[1])
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
                    figures.append((loss.item(), found(*undone), found(*points)))
                mean, undone_found, not_undone = np.mean(figures, axis=0)
                print(f"epoch {epoch}: loss {mean:.2f}, views found: {undone_found:.0%}, not undone: {not_undone:.0%}")


if __name__ == "__main__":
    main()
