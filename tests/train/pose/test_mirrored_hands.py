"""A left hand is estimated as the right hand that a mirror shows: equal views give mirror images of the joints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch

from peclr_dali.models.pose import view_intrinsics
from peclr_dali.pipelines.samples.index import Index
from peclr_dali.synthetic.dataset import make_dataset
from peclr_dali.train.distributed.world import World
from peclr_dali.train.evaluation.errors import evaluation_config
from peclr_dali.train.pose.inference import estimate_poses
from peclr_dali.train.pose.pose_run import PoseRun, load_pose_run
from peclr_dali.train.pose.predict import predict

NETWORK = Path(__file__).parents[3] / "networks" / "hand_photos_rn18.safetensors"
SIDE_PX = 512
CAMERAS = {
    "right": np.array([[900, 0, 276], [0, 900, 256], [0, 0, 1]], np.float32),
    "left": np.array([[900, 0, SIDE_PX - 276], [0, 900, 256], [0, 0, 1]], np.float32),
}


@pytest.fixture(scope="module")
def run() -> PoseRun:
    return load_pose_run(NETWORK)


@pytest.fixture(scope="module")
def hands(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Index]:
    """Rendered right hands, and their pictures in a mirror as left hands: 8 x 8 equal pixels for each of the view."""
    root = tmp_path_factory.mktemp("hands")
    make_dataset(root / "data", poses=2, seed=7, scenes=2, workers=1)
    for name in CAMERAS:
        (root / name).mkdir()
    for file in (root / "data" / "training" / "rgb").iterdir():
        picture = cv2.imread(str(file))
        assert picture is not None
        picture = np.kron(cv2.resize(picture, (64, 64), interpolation=cv2.INTER_AREA), np.ones((8, 8, 1), np.uint8))
        cv2.imwrite(str(root / "right" / f"{file.stem}.png"), picture)
        cv2.imwrite(str(root / "left" / f"{file.stem}.png"), picture[:, ::-1])
    names = sorted(file.name for file in (root / "left").iterdir())
    box_px = np.tile(np.array([SIDE_PX / 2, SIDE_PX / 2, SIDE_PX], np.float32), (len(names), 1))
    return {name: Index(name, root / name, names, box_px, mirror=np.full(8, name == "left")) for name in CAMERAS}


def assert_mirrored(left: Any, right: Any) -> None:
    np.testing.assert_allclose(np.array(left) * [-1, 1, 1], right, rtol=0, atol=1e-5)


def test_in_forward(run: PoseRun) -> None:
    """Views of any rotation and scale: those of the mirrored source have K' diag(-1, 1, 1)."""
    generator = torch.Generator().manual_seed(0)
    image = torch.randint(0, 256, (8, 3, 64, 64), generator=generator, dtype=torch.uint8)
    matrices = torch.randn(8, 2, 3, generator=generator)
    intrinsics = view_intrinsics(torch.from_numpy(CAMERAS["right"]).expand(8, 3, 3), matrices)
    assert 0 < (torch.linalg.det(intrinsics) < 0).sum() < 8
    network = run.network.eval()
    with torch.no_grad():
        right = network(image, intrinsics)
        left = network(image, intrinsics @ torch.diag(torch.tensor([-1.0, 1.0, 1.0])))
    assert_mirrored(left.joints.numpy(), right.joints.numpy())


def test_in_evaluate(run: PoseRun, hands: dict[str, Index]) -> None:
    config = evaluation_config(run, [], ["train.device=cpu", "data.root=unused", "data.split=all"])
    poses = {
        name: estimate_poses(run.network, index, np.tile(CAMERAS[name], (len(index), 1, 1)), config, World())
        for name, index in hands.items()
    }
    assert_mirrored(poses["left"].joints, poses["right"].joints)
    assert np.abs(poses["left"].keypoints_px + poses["right"].keypoints_px)[..., 0] == pytest.approx(SIDE_PX, abs=1e-3)


def test_in_predict(run: PoseRun, hands: dict[str, Index], tmp_path: Path) -> None:
    joints = {}
    low, high = (SIDE_PX / 2 + sign * SIDE_PX / 2 / run.box_margin for sign in (-1, 1))
    for name, index in hands.items():
        (tmp_path / name).with_suffix(".csv").write_text(
            "file,x0,y0,x1,y1,hand\n" + "".join(f"{path},{low},{low},{high},{high},{name}\n" for path in index.paths)
        )
        found = predict(NETWORK, [str(index.root)], tmp_path / name, boxes=tmp_path / f"{name}.csv", drawings=0)
        joints[name] = [prediction.joints for prediction in found.predictions]
    assert_mirrored(joints["left"], joints["right"])
