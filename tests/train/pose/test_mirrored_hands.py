"""A left hand is estimated as the right hand that a mirror shows: equal views give mirror images of the joints."""

from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch

from peclr_dali.models.pose import view_intrinsics
from peclr_dali.pipelines.samples.index import Index
from peclr_dali.train.distributed.world import World
from peclr_dali.train.evaluation.errors import evaluation_config
from peclr_dali.train.pose.inference import estimate_poses
from peclr_dali.train.pose.pose_run import load_pose_run
from peclr_dali.train.pose.predict import predict

NETWORK = Path(__file__).parents[3] / "networks" / "hand_photos_rn18.safetensors"
SIDE_PX = 512
RUN = load_pose_run(NETWORK)
CAMERAS = {
    "right": np.array([[900, 0, 276], [0, 900, 256], [0, 0, 1]], np.float32),
    "left": np.array([[900, 0, SIDE_PX - 276], [0, 900, 256], [0, 0, 1]], np.float32),
}


@pytest.fixture(scope="module")
def hands(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Index]:
    """Noise as right hands, and as seen in a mirror as left ones: 8 x 8 equal pixels for each of the view."""
    root = tmp_path_factory.mktemp("hands")
    box_px = np.full((4, 3), [SIDE_PX / 2, SIDE_PX / 2, SIDE_PX], np.float32)
    names = [f"{number}.png" for number in range(4)]
    indices = {name: Index(name, root / name, names, box_px, mirror=np.full(4, name == "left")) for name in CAMERAS}
    for index in indices.values():
        Path(index.root).mkdir()
        for number in range(4):
            noise = np.random.default_rng(number).integers(0, 256, (64, 64, 3), np.uint8)
            seen = noise[:, ::-1] if index.name == "left" else noise
            cv2.imwrite(str(index.path(number)), np.kron(seen, np.ones((8, 8, 1), np.uint8)))
    return indices


def assert_mirrored(left: Any, right: Any) -> None:
    np.testing.assert_allclose(np.array(left) * [-1, 1, 1], right, rtol=0, atol=1e-5)


def test_in_forward() -> None:
    """Views of any rotation and scale: those of the mirrored source have K' diag(-1, 1, 1)."""
    generator = torch.Generator().manual_seed(0)
    image = torch.randint(0, 256, (8, 3, 64, 64), generator=generator, dtype=torch.uint8)
    matrices = torch.randn(8, 2, 3, generator=generator)
    intrinsics = view_intrinsics(torch.from_numpy(CAMERAS["right"]).expand(8, 3, 3), matrices)
    assert 0 < (torch.linalg.det(intrinsics) < 0).sum() < 8
    network = RUN.network.eval()
    with torch.no_grad():
        right = network(image, intrinsics)
        left = network(image, intrinsics @ torch.diag(torch.tensor([-1.0, 1.0, 1.0])))
    assert_mirrored(left.joints.numpy(), right.joints.numpy())


def test_in_evaluate(hands: dict[str, Index]) -> None:
    config = evaluation_config(RUN, [], ["train.device=cpu", "data.root=unused", "data.split=all"])
    poses = {
        name: estimate_poses(RUN.network, index, np.tile(CAMERAS[name], (len(index), 1, 1)), config, World())
        for name, index in hands.items()
    }
    assert_mirrored(poses["left"].joints, poses["right"].joints)


def test_in_predict(hands: dict[str, Index], tmp_path: Path) -> None:
    joints = {}
    low, high = (SIDE_PX / 2 + sign * SIDE_PX / 2 / RUN.box_margin for sign in (-1, 1))
    for name, index in hands.items():
        (tmp_path / name).with_suffix(".csv").write_text(
            "file,x0,y0,x1,y1,hand\n" + "".join(f"{path},{low},{low},{high},{high},{name}\n" for path in index.paths)
        )
        found = predict(NETWORK, [str(index.root)], tmp_path / name, boxes=tmp_path / f"{name}.csv", drawings=0)
        joints[name] = [prediction.joints for prediction in found.predictions]
    assert_mirrored(joints["left"], joints["right"])
