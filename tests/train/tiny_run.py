"""A pre-training run that takes seconds, as configuration overrides, and what it left."""

import json
from pathlib import Path

import cv2
import numpy as np
import torch

from peclr_dali.train.config.load import load_config
from peclr_dali.train.config.pretraining import Config
from peclr_dali.train.distributed.world import World
from peclr_dali.train.runs.folder import RunFolder
from peclr_dali.train.runs.run import Run
from peclr_dali.train.steps.train_state import TrainState, build_state
from tests.pipelines.harness import smooth_image

ROOT = Path(__file__).parents[2]
CLI = "tests/train/narrow_cli.py"
STEPS = 12
TINY = (
    "data.source=folder", "geometry.side_px=32", "encoder.name=resnet18", "encoder.weights=random",
    "projector.hidden=16", "projector.dim=8", "optim.lr=1e-3", "optim.warmup_epochs=1", "train.batch=12",
    "train.micro_batch=4", "train.epochs=3", "train.threads=1", "pipelines.threads=1", "run.log_every=2",
    "run.checkpoint_every=3", "run.log_samples=true", "train.device=cpu",
)  # fmt: skip


def write_images(root: Path, count: int = 50) -> Path:
    """Their folder: enough images for four steps an epoch, with two to spare."""
    root.mkdir(parents=True)
    rng = np.random.default_rng(0)
    for number in range(count):
        cv2.imwrite(str(root / f"{number:02}.jpg"), smooth_image(rng, 48, 48, 3))
    return root


def settings(images: Path, out: Path, *overrides: str) -> list[str]:
    """What `--set` takes."""
    return [*TINY, f"data.root={images}", f"run.out={out}", *overrides]


def config_of(images: Path, out: Path, *overrides: str) -> Config:
    """The configuration of a run."""
    return load_config(Config, [], settings(images, out, *overrides))


def plain_run(root: Path, world: World, *overrides: str) -> tuple[Run[Config], TrainState]:
    """A run without images, and the state of its network, which is one tensor (1, 5000); 20 steps an epoch."""
    folder = RunFolder(root, keep=9)
    folder.config_file.touch()
    config, layer = load_config(Config, [], [*TINY, *overrides]), torch.nn.Linear(5000, 1, bias=False)
    state = build_state(config, layer, torch.optim.SGD(layer.parameters(), lr=1.0), 20)
    return Run(config, world, folder), state


def final_weights(out: Path, steps: int = STEPS) -> dict[str, torch.Tensor]:
    """The network of the newest checkpoint, which is the last step's."""
    return dict(torch.load(out / "checkpoints" / f"step_{steps:09d}.pt", weights_only=True)["network"])


def rows_of(out: Path) -> list[dict[str, float]]:
    """The rows of metrics.jsonl; none before there is a file."""
    file = out / "metrics.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def samples_of_steps(out: Path) -> dict[int, list[int]]:
    """Samples of every step in global order, over the ranks' files; of a row with pairs, both images."""
    rows = [json.loads(line) for file in out.glob("samples-rank*.jsonl") for line in file.read_text().splitlines()]
    rows.sort(key=lambda row: row["first"])
    steps: dict[int, list[int]] = {row["step"]: [] for row in sorted(rows, key=lambda row: row["step"])}
    for row in rows:
        steps[row["step"]] += [image for views in row["samples"] for image in dict.fromkeys(views)]
    return steps
