"""Labelled hands that are drawn in a moment, in FreiHAND's layout, and fine-tuning runs on them that take seconds."""

import json
from pathlib import Path

import cv2
import numpy as np
import numpy.typing as npt
import torch

from peclr_dali.train.config.finetuning import FinetuneConfig
from peclr_dali.train.config.load import load_config, to_dict
from peclr_dali.train.pose.pose_run import start_pose_network
from peclr_dali.train.runs.checkpoint import Checkpoints
from peclr_dali.train.runs.pictures import draw_skeleton

SIDE_PX = 64
TINY = (
    "geometry.side_px=32", "encoder.name=resnet18", "encoder.weights=random", "optim.lr=1e-3", "train.batch=8",
    "train.micro_batch=4", "train.epochs=3", "train.threads=1", "pipelines.threads=1", "run.log_every=2",
    "run.checkpoint_every=2", "run.log_samples=true", "train.device=cpu", "validation.batch=3",
)  # fmt: skip
STEPS = 15
"""Of TINY on twelve poses: one is held out, 44 images remain."""


def random_hands_m(rng: np.random.Generator, count: int) -> npt.NDArray[np.float64]:
    """Hands (count, 21, 3) in metres before a camera: open, turned a little, fingers bent a little."""
    hands = np.zeros((count, 21, 3))
    for finger in range(5):
        for joint in range(4):
            hands[:, 1 + 4 * finger + joint] = [(finger - 2) * (0.02 + 0.004 * joint), -0.07 - 0.028 * joint, 0]
    hands[:, 1:, 2] = rng.uniform(-0.6, 0.1, (count, 1)) * (hands[:, 1:, 1] + 0.07)
    axis_angle = rng.uniform(-0.5, 0.5, (count, 3))
    turned = np.stack([hand @ cv2.Rodrigues(turn)[0].T for hand, turn in zip(hands, axis_angle, strict=True)])
    return np.asarray(turned + rng.uniform([-0.03, 0.02, 0.55], [0.03, 0.1, 0.75], (count, 3))[:, None])


def write_hands(root: Path, poses: int) -> Path:
    """A FreiHAND of `poses` training poses, and its folder: skeletons on four shades of grey, and their labels."""
    hands_m = random_hands_m(np.random.default_rng(0), poses)
    camera = np.array([[160.0, 0, 32], [0, 160, 32], [0, 0, 1]])
    (root / "training" / "rgb").mkdir(parents=True)
    for version in range(4):
        for pose, hand_m in enumerate(hands_m):
            homogeneous = hand_m @ camera.T
            image = np.full((SIDE_PX, SIDE_PX, 3), 40 * version, np.uint8)
            draw_skeleton(image, homogeneous[:, :2] / homogeneous[:, 2:])
            assert cv2.imwrite(str(root / "training" / "rgb" / f"{pose + poses * version:08d}.jpg"), image[..., ::-1])
    scale_m = np.linalg.norm(hands_m[:, 9] - hands_m[:, 10], axis=1)
    labels = {"K": [camera.tolist()] * poses, "xyz": hands_m.tolist(), "scale": scale_m.tolist()}
    for key, rows in labels.items():
        (root / f"training_{key}.json").write_text(json.dumps(rows))
    return root


def settings(root: Path, out: Path, *overrides: str) -> list[str]:
    """Overrides of a tiny run."""
    return [*TINY, f"data.root={root}", f"run.out={out}", *overrides]


def config_of(root: Path, out: Path, *overrides: str) -> FinetuneConfig:
    """The configuration of a tiny run."""
    return load_config(FinetuneConfig, [], settings(root, out, *overrides))


def untrained_run(out: Path, *overrides: str, seed: int = 0) -> Path:
    """The folder of a run whose best checkpoint holds random weights: what is tested is everything around them."""
    torch.manual_seed(seed)
    config = load_config(FinetuneConfig, [], [*TINY, *overrides])
    network = start_pose_network(config.encoder, config.pose).network
    Checkpoints(out / "best", keep=1).save(3, {"config": to_dict(config), "network": network.state_dict()})
    return out
