"""Run `.venv/bin/python -m examples.own_loss`: pre-trains with a new loss. Run it again to continue.

The loss is alignment and uniformity (Wang and Isola 2020, arXiv 2005.10242).
"""

import argparse
from pathlib import Path

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


def main() -> None:
    """Render hands, train."""
    parser = argparse.ArgumentParser(description=__doc__)
    folders = {"data": Path(".data/own_loss"), "out": Path("runs/own_loss")}
    for name, default in {"poses": 64, "batch": 64, "epochs": 4, **folders}.items():
        parser.add_argument(f"--{name}", type=type(default), default=default)
    args = parser.parse_args()
    make_dataset(args.data, poses=args.poses, seed=0)  # four images each
    settings = [
        f"data.root={args.data}", "geometry.side_px=32", "encoder.name=resnet18",
        "encoder.weights=random", "optim.lr=1e-3", "optim.warmup_epochs=1", f"train.batch={args.batch}",
        f"train.micro_batch={args.batch // 2}", f"train.epochs={args.epochs}", "run.log_every=1", f"run.out={args.out}",
    ]  # fmt: skip
    for row in pretrain(load_config(Config, [], settings), "auto", align_uniform).read_metrics():
        parts = f"{row['alignment']:.3f} + {WEIGHT} * {row['uniformity']:.3f}"
        print(f"step {row['step']}: loss {row['loss']:.3f} = {parts}")


if __name__ == "__main__":
    main()
