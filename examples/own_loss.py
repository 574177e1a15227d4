"""Run `.venv/bin/python -m examples.own_loss`: pre-trains with a new loss. Run it again to continue.

The loss is alignment and uniformity (Wang and Isola 2020, arXiv 2005.10242).
"""

from pathlib import Path

import click
import torch
from torch import Tensor
from torch.nn import functional as F

from peclr_dali.synthetic.dataset import make_dataset
from peclr_dali.train.config.load import load_config
from peclr_dali.train.config.pretraining import Config
from peclr_dali.train.pretrain import pretrain

WEIGHT = 0.5
"""Weight of the uniformity."""


def align_uniform(embeddings: Tensor) -> Tensor:
    """Pulls the two views of a sample together on the unit sphere, and pushes different samples apart.

    Takes both views (2, N, D) of all samples of a batch; returns a scalar.
    """
    views = F.normalize(embeddings, dim=2)
    alignment = (views[0] - views[1]).square().sum(dim=1).mean()
    # pdist: the distances of all pairs of samples
    uniformity = torch.stack([torch.pdist(view).square().mul(-2).exp().mean().log() for view in views]).mean()
    return alignment + WEIGHT * uniformity


@click.command()
@click.option("--data", type=Path, default=Path(".data/own_loss"))
@click.option("--out", type=Path, default=Path("runs/own_loss"))
@click.option("--poses", default=64)
@click.option("--batch", default=64)
@click.option("--epochs", default=4)
def main(data: Path, out: Path, poses: int, batch: int, epochs: int) -> None:
    """Render hands, train."""
    make_dataset(data, poses=poses, seed=0)  # four images each
    settings = [
        f"data.root={data}", "geometry.side_px=32", "encoder.name=resnet18",
        "encoder.weights=random", "optim.lr=1e-3", "optim.warmup_epochs=1", f"train.batch={batch}",
        f"train.micro_batch={batch // 2}", f"train.epochs={epochs}", "run.log_every=1", f"run.out={out}",
    ]  # fmt: skip
    for row in pretrain(load_config(Config, [], settings), "auto", align_uniform).read_metrics():
        parts = f"{row['alignment']:.3f} + {WEIGHT} * {row['uniformity']:.3f}"
        print(f"step {row['step']}: loss {row['loss']:.3f} = {parts}")


if __name__ == "__main__":
    main()
