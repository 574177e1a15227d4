"""Run `.venv/bin/python -m examples.simhand`: pre-trains on pairs of similar hands, with SiMHand's weighted loss.

The method of Lin et al., "SiMHand: Mining Similar Hands for Large-Scale 3D Hand Pose Pre-training" (ICLR 2025, arXiv
2502.15251): the second image of a row shows the hand of another pose whose keypoints are most alike, and the loss
weighs each cosine by the distance of the two hands. The hands are those of `python cli.py make-data .data/hands`; for
data of your own, name a source with keypoints.
"""

import tempfile
from pathlib import Path

import click
import numpy as np
import torch
from sklearn.neighbors import NearestNeighbors
from torch import Tensor, nn
from torch.nn import functional as F

from peclr_dali import Batch, DataConfig, ExactStep, GeometryConfig, keypoints_of_pairs, make_loader
from peclr_dali.pipelines.samples.index import Index
from peclr_dali.pipelines.sources import load_index


def mine(index: Index, pairs: Path) -> float:
    """Write each hand's most similar hand of another pose, for `data.pairs`; returns their mean distance."""
    assert index.keypoints_px is not None  # compared without position and size; SiMHand takes principal components
    shapes = index.keypoints_px - index.keypoints_px.mean(axis=1, keepdims=True)
    shapes[index.mirrored, :, 0] *= -1  # left hands as right ones
    shapes = (shapes / np.linalg.norm(shapes, axis=(1, 2), keepdims=True)).reshape(len(index), -1)
    largest = int(np.bincount(index.groups).max())
    distances, nearest = NearestNeighbors(n_neighbors=largest + 1).fit(shapes).kneighbors(shapes)
    first = (index.groups[nearest] != index.groups[:, None]).argmax(axis=1)
    rows = np.arange(len(index))
    names = np.array(index.paths)
    lines = [f"{name},{other}" for name, other in zip(names, names[nearest[rows, first]], strict=True)]
    pairs.write_text("\n".join(["file,positive", *lines]))
    return float(distances[rows, first].mean())


def weighted_nt_xent(embeddings: Tensor, keypoints_px: Tensor, temperature: float = 0.5) -> Tensor:
    """SiMHand's loss of embeddings (2, N, D) and keypoints (2, N, K, 2) in pixels of the views: a scalar.

    NT-Xent whose cosines are weighted by the mean distance of the two views' keypoints, without gradient.
    """
    views, points = F.normalize(embeddings, dim=2), keypoints_px
    weights_of_pairs = linear_weights((points[0] - points[1]).norm(dim=2).mean(dim=1))  # (N,)
    positive = (views[0] * views[1]).sum(dim=1) * weights_of_pairs / temperature
    unit, places = views.flatten(0, 1), points.flatten(0, 1).transpose(0, 1)  # (2N, D), (K, 2N, 2)
    weights = linear_weights(torch.cdist(places, places).mean(dim=0))  # (2N, 2N)
    return (unit @ unit.T * weights / temperature).fill_diagonal_(-torch.inf).logsumexp(dim=1).mean() - positive.mean()


def linear_weights(distance: Tensor) -> Tensor:
    """1 for the smallest distance, 0 for the largest; 1 if all are equal."""
    width = distance.max() - distance.min()
    return ((distance.max() - distance) / width).masked_fill(width == 0, 1)


@click.command()
@click.option("--root", default=".data/hands")
@click.option("--batch", default=128)
@click.option("--micro-batch", default=32)
@click.option("--epochs", default=8)
def main(root: str, batch: int, micro_batch: int, epochs: int) -> None:
    """Mine and train."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 32, 5, stride=2), nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 128, 5, stride=3), nn.ReLU()]
    network = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(512, 64))
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-3)

    def embed(batch: Batch, rows: slice) -> Tensor:  # both views of some rows, in one call: (2, n, D)
        embeddings: Tensor = network(torch.cat([view.image[rows] for view in batch.views]) / 255)
        return embeddings.unflatten(0, (2, -1))

    step = ExactStep(
        network, embed, weighted_nt_xent, batch=batch, micro_batch=micro_batch, loss_inputs=keypoints_of_pairs
    )
    geometry = GeometryConfig(side_px=48, rotation_deg=(-20, 20), scale=(0.8, 1.25))
    with tempfile.TemporaryDirectory() as folder:
        pairs = Path(folder, "pairs.csv")
        print(f"distance of a hand and its nearest: {mine(load_index(DataConfig(root=root)), pairs):.3f} of its size")
        data = DataConfig(root=root, positive="file", pairs=str(pairs))
        with make_loader(data, batch=batch, geometry=geometry, device="cpu") as loader:
            for epoch in range(epochs):
                for hands in loader:
                    loss = step(hands).loss
                    optimizer.step()
                print(f"epoch {epoch}: loss {loss:.3f}")


if __name__ == "__main__":
    main()
