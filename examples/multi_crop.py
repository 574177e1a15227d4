"""Run `.venv/bin/python -m examples.multi_crop`: DINO's multi-crop, two large and six small views of one decode.

A student learns to predict, from every view, what a teacher says about the large ones (Caron et al. 2021). The
teacher's weights are a running mean of the student's.
"""

from __future__ import annotations

import argparse
import copy
import tempfile
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from peclr_dali import AppearanceConfig, ColourConfig, GeometryConfig, make_loader


def crops(side_px: int, side_frac: tuple[float, float]) -> GeometryConfig:
    """Random squares of the image, flipped left for right half of the time, and nothing else."""
    return GeometryConfig(
        side_px=side_px, rotation_deg=(0, 0), translation_frac=0, scale=(1, 1),
        crop_probability=1, crop_side_frac=side_frac, flip_probability=0.5,
    )  # fmt: skip


LARGE, SMALL = 2, 6
GEOMETRY = [crops(48, (0.6, 1))] * LARGE + [crops(24, (0.25, 0.6))] * SMALL
COLOUR = ColourConfig(hue=(0.9, 1), saturation=(0.7, 1))
APPEARANCE = [AppearanceConfig(blur_probability=1), AppearanceConfig(blur_probability=0.1)]
APPEARANCE += [AppearanceConfig(blur_probability=0.5)] * SMALL


def dino_loss(student: Tensor, teacher: Tensor, center: Tensor) -> Tensor:
    """Mean cross-entropy of views of the student (V, N, D) and other views of the teacher (LARGE, N, D)."""
    wanted, found = F.softmax((teacher - center) / 0.04, dim=-1), F.log_softmax(student / 0.1, dim=-1)
    entropy = -torch.einsum("tnd,vnd->tv", wanted, found) / student.shape[1]
    others = ~torch.eye(LARGE, len(student), dtype=torch.bool, device=student.device)
    return entropy[others].mean()


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
    # The last batch norm keeps answers apart on so few pictures, as DINO's large head does on many.
    student = nn.Sequential(small_network(dim=64), nn.BatchNorm1d(64, affine=False)).to(device)
    teacher = copy.deepcopy(student).requires_grad_(False)
    optimizer = torch.optim.Adam(student.parameters(), lr=1e-3)
    center = torch.zeros(64, device=device)
    with tempfile.TemporaryDirectory() as folder:
        draw_shapes(Path(folder), args.images)
        tables: dict[str, Any] = {"geometry": GEOMETRY, "colour": COLOUR, "appearance": APPEARANCE}
        with make_loader(folder, batch=args.batch, device=device, **tables) as loader:
            for epoch in range(args.epochs):
                losses = []
                for batch in loader:
                    sizes = batch.views[:LARGE], batch.views[LARGE:]
                    large, small = (torch.cat([view.image for view in views]) / 255 for views in sizes)
                    expected = F.normalize(teacher(large)).unflatten(0, (LARGE, -1))
                    found = F.normalize(torch.cat([student(large), student(small)])).unflatten(0, (LARGE + SMALL, -1))
                    loss = dino_loss(found, expected, center)
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
                    center.lerp_(expected.mean((0, 1)), 0.1)
                    for slow, fast in zip(teacher.parameters(), student.parameters(), strict=True):
                        slow.lerp_(fast.detach(), 0.05)
                    losses.append(loss.detach())
                print(f"epoch {epoch}: loss {torch.stack(losses).mean():.3f}")


if __name__ == "__main__":
    main()
