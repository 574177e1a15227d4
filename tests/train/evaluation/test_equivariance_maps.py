"""The maps of the equivariance error, for networks whose error is known."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from peclr_dali.models.pose import PoseOutput
from peclr_dali.pipelines.arrays import DoubleArray
from peclr_dali.pipelines.sources import load_index
from peclr_dali.train.config.finetuning import FinetuneConfig
from peclr_dali.train.config.load import load_config
from peclr_dali.train.evaluation import equivariance_maps as maps_module
from peclr_dali.train.evaluation.equivariance_maps import equivariance_maps
from peclr_dali.train.pose.labels import labels_to_learn
from peclr_dali.train.pose.pose_run import PoseRun
from tests.train import tiny_hands


@pytest.fixture(autouse=True)
def few_places(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(maps_module, "ANGLES_DEG", np.linspace(-80, 80, 5))
    monkeypatch.setattr(maps_module, "SHIFTS_PX", np.linspace(-25, 25, 3))


class Known(nn.Module):
    """Takes the place of a network: finds a blob of light, or always says the same."""

    def __init__(self, *, finds: bool) -> None:
        super().__init__()
        self.finds, self.nothing = finds, nn.Parameter(torch.zeros(1))

    def forward(self, image: Tensor, intrinsics: Tensor) -> PoseOutput:
        side = image.shape[-1]
        place = torch.full((len(image), 2), 0.75 * side, dtype=torch.float64)
        if self.finds:
            light = image.double().sum(dim=1)
            weight = light / light.sum(dim=(1, 2), keepdim=True)
            centres = torch.arange(side, dtype=torch.float64) + 0.5
            place = torch.stack([weight.sum(1) @ centres, weight.sum(2) @ centres], dim=1)
        depth = torch.zeros(len(image), 21)
        return PoseOutput(
            place[:, None].expand(-1, 21, 2), depth, depth[:, 0], depth[:, 0], torch.zeros(len(image), 21, 3)
        )


@pytest.fixture(scope="module")
def blobs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pictures of one bright blob on black, off the centre; the labels are those of hands."""
    import cv2

    root = tiny_hands.write_hands(tmp_path_factory.mktemp("data") / "blobs", 3)
    for number, file in enumerate(sorted((root / "training" / "rgb").iterdir())):
        picture = np.zeros((64, 64, 3), np.uint8)
        cv2.circle(picture, (35 - number % 5, 30), 4, (255, 255, 255), -1)
        cv2.imwrite(str(file), picture)
    return root


def config_of(blobs: Path) -> FinetuneConfig:
    overrides = [*tiny_hands.TINY, f"data.root={blobs}", "data.split=all", "data.box=center", "data.center_frac=1.0",
                 "data.box_margin=1.0", "geometry.side_px=64"]  # fmt: skip
    return load_config(FinetuneConfig, [], overrides)


def maps_of(blobs: Path, *, finds: bool) -> dict[str, DoubleArray]:
    network: Any = Known(finds=finds)
    config = config_of(blobs)
    index = load_index(config.data)
    return equivariance_maps(PoseRun(Path("run"), 1, config, network, True), config, index, labels_to_learn(index))


def test_a_network_that_follows_the_picture_has_no_error(blobs: Path) -> None:
    found = maps_of(blobs, finds=True)
    assert found["rotation_deg"].tolist() == [-80, -40, 0, 40, 80]
    assert found["shift_px"].tolist() == [-25, 0, 25]
    np.testing.assert_allclose(found["rotation_error_px"], 0, atol=0.5)
    np.testing.assert_allclose(found["shift_error_px"], 0, atol=0.5)


def test_a_network_that_always_says_the_same_has_the_length_of_the_motion(blobs: Path) -> None:
    """A quarter of the side from the centre in x and y: 32 px of 128 each."""
    found = maps_of(blobs, finds=False)
    chords = 2 * 32 * np.sqrt(2) * np.sin(np.radians(np.abs(found["rotation_deg"])) / 2)
    np.testing.assert_allclose(found["rotation_error_px"], chords, atol=1e-3)
    of_constant = found["constant_rotation_error_px"]  # of the mean labels, in the whole picture of 64 px
    keypoints_px = load_index(config_of(blobs).data).tables["keypoints_px"]
    distances_px = np.linalg.norm(2 * keypoints_px.mean(axis=0) - 64, axis=1)
    np.testing.assert_allclose(of_constant, chords / (32 * np.sqrt(2)) * distances_px.mean(), atol=0.01)
    x, y = np.meshgrid(found["shift_px"], found["shift_px"])
    np.testing.assert_allclose(found["shift_error_px"], np.hypot(x, y), atol=1e-3)
