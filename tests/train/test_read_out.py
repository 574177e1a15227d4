"""The read-out: the head of its network is scikit-learn's ridge regression on the encoder's features."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.linear_model import Ridge
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from peclr_dali.errors import UserError
from peclr_dali.pipelines.sources import load_index, write_bad_list
from peclr_dali.train.distributed.world import World
from peclr_dali.train.evaluation.errors import evaluation_config
from peclr_dali.train.pose.inference import canonical_loader, estimate_poses
from peclr_dali.train.pose.labels import labels_to_learn
from peclr_dali.train.pose.pose_run import load_pose_run
from peclr_dali.train.probe import ALPHA, fit_read_out
from tests.train.tiny_hands import config_of

pytestmark = pytest.mark.usefixtures("narrow")


def test_its_poses_are_those_of_scikit_learn(hands: Path, tmp_path: Path) -> None:
    """Targets come from the labels and boxes without the read-out."""
    run = load_pose_run(fit_read_out(config_of(hands, tmp_path / "run", "train.frozen=true")).root)
    assert run.network.refinement is None
    features, views, boxes = {}, {}, {}
    for split in ("train", "val"):
        config = evaluation_config(run, (), [f"data.split={split}"])
        index = load_index(config.data)
        with canonical_loader(index, np.arange(len(index)), 1, config, World()) as loader, torch.inference_mode():
            features[split] = (
                torch.cat([run.network.features(batch.views[0].image) for batch in loader]).double().numpy()
            )
        box = index.box_px.astype(np.float64)[:, None]
        xyz = index.targets["xyz_m"].astype(np.float64)
        depth = (xyz[..., 2] - xyz[:, :1, 2]) / index.targets["scale_m"].astype(np.float64)[:, None]
        views[split] = np.concatenate(
            [((index.tables["keypoints_px"] - box[..., :2]) / box[..., 2:]), depth[..., None]], axis=2
        )
        boxes[split] = box
    model = make_pipeline(StandardScaler(), Ridge(ALPHA)).fit(features["train"], views["train"].reshape(-1, 63))
    expected = (
        model.predict(features["val"]).reshape(-1, 21, 3)[..., :2] * boxes["val"][..., 2:] + boxes["val"][..., :2]
    )
    labels = labels_to_learn(index)  # of the validation split
    poses = estimate_poses(run.network, index, labels.intrinsics, config, World())
    np.testing.assert_allclose(poses.keypoints_px, expected, rtol=0, atol=0.02)
    assert np.abs(poses.keypoints_px - labels.keypoints_px).max() > 0.5  # nothing is read off the labels


def test_a_substitute_is_not_fitted_as_a_sample_of_its_own(hands: Path, tmp_path: Path) -> None:
    """With a file that cannot be read, the head is that of the other files."""
    root = shutil.copytree(hands, tmp_path / "hands")
    index = load_index(config_of(root, tmp_path).data)
    bad = index.path(3)
    write_bad_list(tmp_path / "bad.jsonl", {index.paths[3]: "cannot be read"})
    without = fit_read_out(config_of(root, tmp_path / "without", f"data.bad_list={tmp_path / 'bad.jsonl'}"))
    bad.write_bytes(b"no picture")
    damaged = fit_read_out(config_of(root, tmp_path / "damaged", "data.max_bad_share=0.5"))
    one, other = (load_pose_run(folder.root).network.head.state_dict() for folder in (without, damaged))
    assert isinstance(one["weight"], torch.Tensor)
    torch.testing.assert_close(one["weight"], other["weight"], rtol=1e-4, atol=1e-6)


def test_several_processes_are_refused(hands: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each would fit to its share of the images."""
    for name, value in {"RANK": 1, "LOCAL_RANK": 1, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}.items():
        monkeypatch.setenv(name, str(value))
    with pytest.raises(UserError, match="by one process, and torchrun started 2: leave torchrun out"):
        fit_read_out(config_of(hands, tmp_path / "run"))
    assert not (tmp_path / "run").exists()


def test_it_is_fitted_once_and_the_encoder_stays(hands: Path, tmp_path: Path) -> None:
    start = fit_read_out(config_of(hands, tmp_path / "start", "run.seed=3")).checkpoints.latest()
    config = config_of(hands, tmp_path / "run", f"encoder.weights={start}", "data.label_fraction=0.5")
    path = fit_read_out(config).checkpoints.latest()
    assert path is not None
    assert start is not None
    before, after = (torch.load(one, weights_only=True)["network"] for one in (start, path))
    assert all(torch.equal(before[key], after[key]) for key in before if key.startswith("encoder"))
    assert not torch.equal(before["head.weight"], after["head.weight"])
    written = path.stat().st_mtime_ns
    fit_read_out(config, "auto")
    assert path.stat().st_mtime_ns == written
    with pytest.raises(UserError, match=r"label_fraction: was 0\.5, is now 1\.0"):
        fit_read_out(config_of(hands, tmp_path / "run", f"encoder.weights={start}"), "auto")
