"""Run `.venv/bin/python -m examples.simhand`: pre-trains on pairs of similar hands, with SiMHand's weighted loss.

The method of Lin et al., "SiMHand: Mining Similar Hands for Large-Scale 3D Hand Pose Pre-training" (ICLR 2025, arXiv
2502.15251): the second image of a row shows the hand of another video whose keypoints are most alike, and the loss
weighs each cosine by the distance of the two hands. For data of your own, name a source with keypoints.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import cv2
import numpy as np
import torch
from sklearn.neighbors import NearestNeighbors
from torch import Tensor, nn
from torch.nn import functional as F

from peclr_dali import Batch, DataConfig, ExactStep, GeometryConfig, keypoints_of_pairs, make_loader
from peclr_dali.pipelines.samples.index import Index
from peclr_dali.pipelines.sources import load_index
from peclr_dali.skeleton import HAND


def draw_hands(folder: Path, count: int, videos: int = 4, side_px: int = 96) -> None:
    """Pictures of stick hands in folders of their videos, and boxes.csv with their keypoints."""
    rng = np.random.default_rng(0)
    landmarks = [f"{name}_{axis}" for name in HAND.keypoints for axis in "xy"]
    rows: list[list[object]] = [["file", "x0", "y0", "x1", "y1", "hand", "confidence", *landmarks]]
    for number in range(count):
        angles = np.arange(-2, 3)[:, None] * rng.uniform(0.15, 0.5) + rng.uniform(-0.3, 0.3, (5, 1)) * np.arange(4)
        bones_px = 9 * np.stack([np.sin(angles), -np.cos(angles)], axis=2)  # (5, 4, 2)
        wrist_px = rng.normal((side_px / 2, 0.75 * side_px), 2)
        points_px = np.concatenate([[wrist_px], (wrist_px + bones_px.cumsum(axis=1)).reshape(-1, 2)])
        picture = np.full((side_px, side_px, 3), rng.integers(0, 200, 3), np.uint8)
        for start, end in HAND.bones:
            begin, stop = points_px[[start, end]].astype(int).tolist()
            cv2.line(picture, begin, stop, rng.integers(150, 256, 3).tolist(), 3, cv2.LINE_AA)
        name = f"video-{number % videos}/{number:04}.png"
        (folder / name).parent.mkdir(exist_ok=True)
        cv2.imwrite(str(folder / name), picture)
        rows.append([name, *points_px.min(axis=0), *points_px.max(axis=0), "right", 1, *points_px.ravel()])
    (folder / "boxes.csv").write_text("\n".join(",".join(map(str, row)) for row in rows))


def mine(index: Index, pairs: Path) -> float:
    """Write each hand's most similar hand of another folder, for `data.pairs`; returns their mean distance."""
    assert index.keypoints_px is not None  # compared without position and size; SiMHand takes principal components
    shapes = index.keypoints_px - index.keypoints_px.mean(axis=1, keepdims=True)
    shapes[index.mirrored, :, 0] *= -1  # left hands as right ones
    shapes = (shapes / np.linalg.norm(shapes, axis=(1, 2), keepdims=True)).reshape(len(index), -1)
    names = np.array(index.paths)
    videos = np.array([name.rpartition("/")[0] for name in index.paths])
    rows, distances = ["file,positive"], list[float]()
    for video in np.unique(videos):
        here, others = np.flatnonzero(videos == video), np.flatnonzero(videos != video)
        distance, nearest = NearestNeighbors(n_neighbors=1).fit(shapes[others]).kneighbors(shapes[here])
        rows += [f"{one},{other}" for one, other in zip(names[here], names[others[nearest[:, 0]]], strict=True)]
        distances += distance[:, 0].tolist()
    pairs.write_text("\n".join(rows))
    return float(np.mean(distances))


def weighted_nt_xent(embeddings: Tensor, keypoints_px: Tensor, temperature: float = 0.5) -> Tensor:
    """SiMHand's loss of embeddings (2, N, D) and keypoints (2, N, K, 2) in pixels of the views: a scalar.

    NT-Xent whose cosines are weighted by the mean distance of the two views' keypoints, without gradient.
    """
    views, points = F.normalize(embeddings, dim=2), keypoints_px
    of_pairs = linear_weights((points[0] - points[1]).norm(dim=2).mean(dim=1))  # (N,)
    positive = (views[0] * views[1]).sum(dim=1) * of_pairs / temperature
    unit, places = views.flatten(0, 1), points.flatten(0, 1).transpose(0, 1)  # (2N, D), (K, 2N, 2)
    of_all = linear_weights(torch.cdist(places, places).mean(dim=0))  # (2N, 2N)
    others = (unit @ unit.T * of_all / temperature).fill_diagonal_(-torch.inf)
    return others.logsumexp(dim=1).mean() - positive.mean()


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
    layers = [nn.Conv2d(3, 32, 5, stride=2), nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 128, 5, stride=3), nn.ReLU()]
    network = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(512, 64))
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-3)

    def embed(batch: Batch, rows: slice) -> Tensor:  # both views of some rows, in one call: (2, n, D)
        embeddings: Tensor = network(torch.cat([view.image[rows] for view in batch.views]) / 255)
        return embeddings.unflatten(0, (2, -1))

    geometry = GeometryConfig(side_px=48, rotation_deg=(-20, 20), scale=(0.8, 1.25))
    with tempfile.TemporaryDirectory() as name:
        boxes, pairs = Path(name, "boxes.csv"), Path(name, "pairs.csv")
        draw_hands(Path(name), args.images)
        index = load_index(DataConfig("folder", name, box=str(boxes)))
        print(f"distance of a hand and its nearest: {mine(index, pairs):.3f} of its size")
        data = DataConfig("folder", name, box=str(boxes), positive="file", pairs=str(pairs))
        with make_loader(data, batch=args.batch, geometry=geometry, device="cpu") as loader:
            sizes = {"batch": args.batch, "micro_batch": args.micro_batch}
            step = ExactStep(network, embed, weighted_nt_xent, loss_inputs=keypoints_of_pairs, **sizes)
            for epoch in range(args.epochs):
                for batch in loader:
                    loss = step(batch).loss
                    optimizer.step()
                print(f"epoch {epoch}: loss {loss:.3f}")


if __name__ == "__main__":
    main()
