"""Run `.venv/bin/python -m examples.simhand`: pre-trains on pairs of similar hands, with SiMHand's weighted loss.

The method of Lin et al., "SiMHand: Mining Similar Hands for Large-Scale 3D Hand Pose Pre-training" (ICLR 2025, arXiv
2502.15251): the second image of a row shows the hand of another video whose keypoints are most alike, and the loss
weighs each cosine by the distance of the two hands. The program draws stick hands of a few "videos"; for data of your
own, give `make_loader` a source with keypoints.
"""

from __future__ import annotations

import argparse
import csv
import tempfile
from dataclasses import replace
from pathlib import Path

import cv2
import numpy as np
import torch
from sklearn.neighbors import NearestNeighbors
from torch import Tensor, nn
from torch.nn import functional as F

from peclr_dali import Batch, ColourConfig, DataConfig, ExactStep, GeometryConfig, make_loader
from peclr_dali.pipelines.samples.index import Index
from peclr_dali.pipelines.sources import load_index
from peclr_dali.skeleton import HAND
from peclr_dali.train.steps.exact import keypoints_of_pairs


def draw_hands(folder: Path, count: int, videos: int = 4, side_px: int = 96) -> None:
    """Pictures of stick hands in folders of their videos, and boxes.csv with their keypoints."""
    rng = np.random.default_rng(0)
    landmarks = [f"{name}_{axis}" for name in HAND.keypoints for axis in "xy"]
    with (folder / "boxes.csv").open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["file", "x0", "y0", "x1", "y1", "hand", "confidence", *landmarks])
        for number in range(count):
            fan, bend = rng.uniform(0.15, 0.5), rng.uniform(-0.3, 0.3, 5)
            angles = (np.arange(-2, 3) * fan)[:, None] + bend[:, None] * np.arange(4) + rng.normal(0, 0.2)
            bones_px = 9 * np.stack([np.sin(angles), -np.cos(angles)], axis=2)  # (5, 4, 2)
            wrist_px = rng.normal((side_px / 2, 0.75 * side_px), 2)
            points_px = np.concatenate([[wrist_px], (wrist_px + bones_px.cumsum(axis=1)).reshape(-1, 2)])
            picture = np.full((side_px, side_px, 3), rng.integers(0, 200, 3), np.uint8)
            for start, end in HAND.bones:
                begin, stop = (points_px[[start, end]] * 16).astype(int).tolist()
                cv2.line(picture, begin, stop, rng.integers(150, 256, 3).tolist(), 3, cv2.LINE_AA, 4)
            name = f"video-{number % videos}/{number:04}.png"
            (folder / name).parent.mkdir(exist_ok=True)
            cv2.imwrite(str(folder / name), picture)
            box = [*points_px.min(axis=0), *points_px.max(axis=0)]
            rows.writerow([name, *box, "right", 1, *points_px.ravel()])


def mine(index: Index, pairs: Path) -> float:
    """Write the most similar hand of another folder for each hand, for `data.pairs`; returns their mean distance.

    Shapes are compared without position and size, as principal components in SiMHand; so few need none. 1 is the size
    of a hand.
    """
    assert index.keypoints_px is not None
    shapes = index.keypoints_px - index.keypoints_px.mean(axis=1, keepdims=True)
    shapes[index.mirrored, :, 0] *= -1  # left hands as right ones
    shapes = (shapes / np.linalg.norm(shapes, axis=(1, 2), keepdims=True)).reshape(len(index), -1)
    videos = np.array([path.rpartition("/")[0] for path in index.paths])
    found = []
    for video in np.unique(videos):
        rows, others = np.flatnonzero(videos == video), np.flatnonzero(videos != video)
        distance, nearest = NearestNeighbors(n_neighbors=1).fit(shapes[others]).kneighbors(shapes[rows])
        found += list(zip(rows.tolist(), others[nearest[:, 0]].tolist(), distance[:, 0].tolist(), strict=True))
    with pairs.open("w", newline="") as file:
        csv.writer(file).writerows([("file", "positive"), *((index.paths[a], index.paths[b]) for a, b, _ in found)])
    return float(np.mean([distance for *_, distance in found]))


def weighted_nt_xent(embeddings: Tensor, keypoints_px: Tensor, temperature: float = 0.5) -> Tensor:
    """SiMHand's loss of embeddings (2, N, D) and keypoints (2, N, K, 2) in pixels of the views: a scalar.

    NT-Xent whose cosines are multiplied by (max d - d) / (max d - min d), d being the mean distance of the keypoints of
    two views. In the numerator, maximum and minimum are those of the N pairs; in the denominator, of all pairs of
    views. No gradient goes through the weights.
    """
    unit, points = F.normalize(embeddings, dim=2).flatten(0, 1), keypoints_px.flatten(0, 1)  # (2N, D), (2N, K, 2)
    count = len(unit) // 2
    partner = torch.arange(2 * count, device=unit.device).roll(count)
    distance = torch.stack([torch.cdist(one, one) for one in points.unbind(1)]).mean(dim=0)  # (2N, 2N)
    of_pairs = distance.gather(1, partner[:, None])[:, 0]
    cosine = unit @ unit.T
    itself = torch.eye(2 * count, dtype=torch.bool, device=unit.device)
    others = (cosine * linear_weights(distance) / temperature).masked_fill(itself, -torch.inf)
    pairs = cosine.gather(1, partner[:, None])[:, 0] * linear_weights(of_pairs) / temperature
    return (others.logsumexp(dim=1) - pairs).mean()


def linear_weights(distance: Tensor) -> Tensor:
    """1 for the smallest distance, 0 for the largest; 1 if all are equal."""
    width = distance.max() - distance.min()
    return ((distance.max() - distance) / width).masked_fill(width == 0, 1)


def main() -> None:
    """Draw, mine, train."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (("images", 512), ("batch", 128), ("micro-batch", 32), ("epochs", 8)):
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for before, after in ((3, 32), (32, 64), (64, 128)):
        layers += [nn.Conv2d(before, after, 3, stride=2, padding=1), nn.BatchNorm2d(after), nn.ReLU()]
    network = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(512, 64))
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-3)

    def embed(batch: Batch, rows: slice) -> Tensor:
        """Both views of some rows of a batch, in one call: (2, n, D)."""
        embeddings: Tensor = network(torch.cat([view.image[rows] for view in batch.views]) / 255)
        return embeddings.unflatten(0, (2, -1))

    geometry = GeometryConfig(side_px=48, rotation_deg=(-20, 20), scale=(0.8, 1.25))
    colour = ColourConfig(hue=(0.9, 1), saturation=(0.7, 1))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        draw_hands(folder, args.images)
        data, pairs = DataConfig("folder", name, box=str(folder / "boxes.csv")), folder / "pairs.csv"
        print(f"distance of a hand and its nearest: {mine(load_index(data), pairs):.3f} of its size")
        data = replace(data, positive="file", pairs=str(pairs))
        with make_loader(data, batch=args.batch, geometry=geometry, colour=colour, device="cpu") as loader:
            sizes = {"batch": args.batch, "micro_batch": args.micro_batch}
            step = ExactStep(network, embed, weighted_nt_xent, loss_inputs=keypoints_of_pairs, **sizes)
            for epoch in range(args.epochs):
                losses = []
                for batch in loader:
                    losses.append(step(batch).loss)
                    optimizer.step()
                print(f"epoch {epoch}: loss {torch.stack(losses).mean():.3f}")


if __name__ == "__main__":
    main()
