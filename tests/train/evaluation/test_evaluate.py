import csv
import dataclasses
import json
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, cast

import cv2
import numpy as np
import pytest
import torch
from rich.table import Table
from torch import Tensor

from peclr_dali.errors import UserError
from peclr_dali.models.pose import PoseNetwork, PoseOutput
from peclr_dali.pipelines.config import DataConfig
from peclr_dali.pipelines.samples.index import Index
from peclr_dali.pipelines.sources import load_index, write_bad_list
from peclr_dali.train.config.finetuning import FinetuneConfig
from peclr_dali.train.config.load import load_config, to_dict
from peclr_dali.train.distributed.world import World
from peclr_dali.train.evaluation.errors import (
    Evaluation,
    evaluation_config,
    for_other_run,
    mean_of,
    measure,
    trained_on,
)
from peclr_dali.train.evaluation.evaluate import RESULTS, evaluate, grouped
from peclr_dali.train.evaluation.report import lost_and_notes
from peclr_dali.train.pose.inference import Poses, estimate_in_two_passes, estimate_poses
from peclr_dali.train.pose.labels import Errors, PoseLabels
from peclr_dali.train.pose.metrics import beats_constants, metric_of, pixel_errors, pose_tables
from peclr_dali.train.pose.pose_run import PoseRun, load_pose_run
from tests.train import tiny_hands

POSES = 20


@pytest.fixture(scope="module")
def hands(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_hands.write_hands(tmp_path_factory.mktemp("hands") / "data", POSES)


@pytest.fixture(scope="module")
def run(hands: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_hands.untrained_run(tmp_path_factory.mktemp("runs") / "run", f"data.root={hands}")


def call(run: Path | list[Path], out: Path, *overrides: str, **options: Any) -> tuple[list[Table], list[Path]]:
    settings: dict[str, Any] = {
        "compare": [], "crop": "boxes", "worst": 3, "submission": False, "proper_rotation": False, **options
    }  # fmt: skip
    return evaluate(run if isinstance(run, list) else [run], [], overrides, out=out, **settings)


class Knowing(PoseNetwork):
    """Says the truth, plus an error that is its own choice; it finds the hand by the view's intrinsics."""

    def know(self, joints: Tensor, error: Tensor) -> None:
        self.joints, self.error, self.calls = joints, error, 0

    def forward(self, image: Tensor, intrinsics: Tensor) -> PoseOutput:
        rows = torch.arange(self.calls, self.calls + len(image)) % len(self.joints)  # the last batch is filled up
        self.calls += len(image)
        joints = self.joints[rows] + self.error[rows]
        homogeneous = joints @ intrinsics.double().mT
        nothing = torch.zeros(len(image), 21)
        return PoseOutput(homogeneous[..., :2] / homogeneous[..., 2:], nothing, nothing[:, 0], nothing[:, 0], joints)


def knowing_run(run: Path, error: float = 0.0, precision: str = "fp32") -> tuple[PoseRun, FinetuneConfig, Index]:
    loaded = load_pose_run(run)
    overrides = ["data.split=all", "data.versions=['gs']", f"train.precision={precision}"]
    config = evaluation_config(loaded, [], overrides)
    index = load_index(config.data)
    scale = index.targets["scale_m"][:, None, None]
    network = Knowing(loaded.network.encoder, loaded.config.pose)
    wrong = error * torch.randn(len(index), 21, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    network.know(torch.from_numpy(index.targets["xyz_m"] / scale).double(), wrong)
    return dataclasses.replace(loaded, network=network), config, index


def measured(run: PoseRun, config: FinetuneConfig, index: Index) -> tuple[Poses, Evaluation]:
    truth = PoseLabels.of(index)
    poses = estimate_poses(run.network, index, truth.intrinsics, config, World())
    return poses, measure(run, config, index, truth, poses)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_perfect_network_has_no_error(run: Path, precision: str) -> None:
    """So frames, units and orders agree from the labels to the metrics, and geometry is not computed in 16 bits."""
    _, found = measured(*knowing_run(run, precision=precision))
    values = {name: interval.value for name, interval in found.intervals.items()}
    assert max(values["epe_cm"], values["pa_epe_cm"], values["epe_px"] / 10) < 1e-4
    assert values["auc"] > 0.99
    assert found.errors.measured == len(found.index)


def test_errors_are_those_of_the_metrics_and_the_worst_come_first(run: Path) -> None:
    knowing, config, index = knowing_run(run, error=0.5)
    poses, found = measured(knowing, config, index)
    truth = found.labels
    expected = pose_tables(poses.joints * truth.scale_m[:, None, None], truth.joints)
    expected["epe_px"] = pixel_errors(poses.keypoints_px, truth.keypoints_px)
    in_view = np.einsum("nij,nkj->nki", poses.source_to_view_px[:, :, :2], poses.keypoints_px - truth.keypoints_px)
    expected["epe_px_of_224"] = np.linalg.norm(in_view, axis=2) * 224 / config.geometry.side_px
    box_px = np.ptp(truth.keypoints_px, axis=1).max(axis=1)
    for share in (0.1, 0.2):
        expected[f"pck_{share}"] = (expected["epe_px"] <= share * box_px[:, None]).astype(np.float64)
    assert 0.05 < metric_of(expected["pck_0.1"]) < metric_of(expected["pck_0.2"]) < 0.95
    assert metric_of(expected["epe_cm"]) > 0.5
    assert found.intervals.keys() == expected.keys()
    for name, interval in found.intervals.items():
        assert interval.value == pytest.approx(metric_of(expected[name]))
    assert found.worst(4).tolist() == np.argsort(-expected["pa_epe_cm"].mean(axis=1))[:4].tolist()
    assert all(interval.value == 0 for interval in found.minus(found).values())


def test_what_cannot_be_measured_is_counted(run: Path) -> None:
    knowing, config, index = knowing_run(run)
    truth = PoseLabels.of(index)
    poses = estimate_poses(knowing.network, index, truth.intrinsics, config, World())
    poses.joints[2] = np.nan
    poses.joints[3] = poses.joints[3, 0]
    poses.samples[5] = 6
    truth.joints[7], truth.keypoints_px[7] = np.nan, np.nan
    truth.scale_m[9] = np.nan  # its absolute errors have no unit, its aligned ones need none
    truth.joints[11, 4] = np.nan  # a keypoint
    truth.joints[12] = truth.joints[12, 0]
    truth.joints[13, 1:], truth.joints[13, 20] = np.nan, truth.joints[13, 0]  # two keypoints
    truth.joints[14, 1:] = np.nan  # one keypoint is no hand in one place
    found = measure(knowing, config, index, truth, poses)
    assert found.errors.left_out == {
        "unreadable": 1,
        "without labels": 1,
        "label is one point": 2,
        "prediction is not finite": 1,
    }
    tables = found.errors.tables
    for row in (2, 5, 7, 12, 13):
        assert all(np.isnan(table[row]).all() for table in tables.values())
    assert np.isnan(tables["epe_cm"][9]).all()
    assert not np.isnan(tables["pa_epe_cm"][9]).any()
    assert np.isnan(tables["epe_cm"][11]).sum() == 1
    assert np.isnan(tables["epe_cm"][14]).sum() == 20
    poses.joints[:] = np.nan
    with pytest.raises(UserError, match=r"no sample can be measured .*16 prediction is not finite"):
        measure(knowing, config, index, truth, poses)


def test_the_command_writes_everything(run: Path, hands: Path, tmp_path: Path) -> None:
    other = tiny_hands.untrained_run(tmp_path / "other", f"data.root={hands}", seed=1)
    tables, written = call(run, tmp_path / "out", compare=[other], groups="1")  # the poses are two groups
    assert [file.name for file in written] == list(RESULTS)
    assert len(tables) == 2
    content = json.loads((tmp_path / "out" / "metrics.json").read_text())
    assert content["images"] == 4 * POSES // 10  # the held-out poses with their four backgrounds
    assert [(source["part"], source["split"]) for source in content["sources"]] == [("training", "val")]
    in_2d = {"epe_px", "epe_px_of_224", "pck_0.1", "pck_0.2"}
    assert set(content["metrics"]) == {"epe_cm", "auc", "pa_epe_cm", "pa_auc", *in_2d}
    assert all(entry["low"] <= entry["value"] <= entry["high"] for entry in content["metrics"].values())
    assert {name: set(errors) for name, errors in content["constants"].items()} == {
        "mean_keypoints": {"epe_px"}, "mean_joints": {"epe_cm", "auc"},
        "rigid_pose": {"pa_epe_cm", "pa_auc"},
    }  # fmt: skip
    assert content["groups"] == "1"
    assert len(content["per_keypoint"]["pa_epe_cm"]) == 21
    assert len(content["pck"]["aligned_m"]["share"]) == 100
    minus = content["comparison"]
    for name, entry in minus["difference"].items():
        assert entry["value"] == pytest.approx(
            content["metrics"][name]["value"] - minus["other"]["metrics"][name]["value"]
        )
    rows = list(csv.DictReader((tmp_path / "out" / "poses.csv").read_text().splitlines()))
    by_error = sorted(rows, key=lambda row: -float(row["pa_epe_cm"]))
    assert [hand["file"] for hand in content["worst"]] == [row["file"] for row in by_error[:3]]
    assert content["worst"][0]["pa_epe_cm"] == pytest.approx(float(by_error[0]["pa_epe_cm"]), 1e-4)
    assert np.mean([float(row["epe_px"]) for row in rows]) == pytest.approx(content["metrics"]["epe_px"]["value"], 1e-4)
    for name in ("pck.png", "worst.png"):
        assert np.asarray(cv2.imread(str(tmp_path / "out" / name))).std() > 10


def test_several_runs_are_measured_in_pairs_of_one_seed(hands: Path, tmp_path: Path) -> None:
    ours, theirs = (
        [
            tiny_hands.untrained_run(
                tmp_path / f"{side}_{seed}", f"data.root={hands}", f"run.seed={seed}", seed=at + seed
            )
            for seed in (0, 1)
        ]
        for at, side in ((0, "p"), (2, "s"))
    )
    tables, _ = call(ours, tmp_path / "out", compare=theirs[::-1], groups="1")
    found = json.loads((tmp_path / "out" / "metrics.json").read_text())
    assert [Path(path).parts[-3] for path in [*found["checkpoints"], *found["comparison"]["other"]["checkpoints"]]] == [
        "p_0",
        "p_1",
        "s_0",
        "s_1",
    ]
    assert str(tables[1].caption) == " ".join(found["comparison"]["notes"])
    curve, area = found["pck"]["aligned_m"], found["metrics"]["pa_auc"]["value"]
    assert np.trapezoid(curve["share"], curve["thresholds"]) / 0.05 == pytest.approx(area)  # a mean of curves
    with pytest.raises(UserError, match=r"RUN has the seeds \[0, 1\], --compare \[0\], and seed 1 is no pair"):
        call(ours, tmp_path / "out", compare=theirs[:1])


def test_a_metric_is_lost_where_both_sides_are_no_better_than_a_constant() -> None:
    sides = [{"lost_to_constants": lost, "checkpoints": ["a"]} for lost in (["epe_px", "epe_cm"], ["auc", "epe_px"])]
    for ours, theirs in (sides, sides[::-1]):
        assert lost_and_notes(ours, theirs)["lost"] == ["epe_px"]


def with_error(seed: int, error_px: float, weights: str = "random") -> Evaluation:
    """An evaluation of 20 hands with one error."""
    config = SimpleNamespace(run=SimpleNamespace(seed=seed), encoder=SimpleNamespace(weights=weights))
    run, none = cast(Any, SimpleNamespace(config=config)), cast(Any, None)
    index = Index("hands", Path(), ["hand.jpg"] * 20, np.zeros((20, 3), np.float32))
    return Evaluation(run, none, index, none, Errors({"epe_px": np.full((20, 21), error_px)}, 20, {}))


def test_the_difference_of_several_runs_is_over_pairs_of_independent_runs() -> None:
    """Student's interval of 1 and 2; zero of the same runs; none of pairs from one pre-training."""
    ours, theirs = (mean_of([with_error(0, one), with_error(1, two)]) for one, two in ((3, 5), (2, 3)))
    assert ours.minus(theirs)["epe_px"] == pytest.approx((1.5, 1.5 - 12.7062 / 2, 1.5 + 12.7062 / 2), abs=1e-4)
    assert ours.minus(ours)["epe_px"] == (0, 0, 0)
    pretrained = mean_of([with_error(seed, 1, "runs/pretrained") for seed in (0, 1)])
    assert {theirs.minus(pretrained)["epe_px"].low, pretrained.minus(theirs)["epe_px"].low} == {-np.inf}


def test_a_metric_beats_the_constants_if_it_is_better_than_all_of_them() -> None:
    constants = {"rigid_pose": {"pa_epe_cm": 1.5, "pa_auc": 0.7}, "another": {"pa_epe_cm": 1.4}}
    assert [
        beats_constants(value, metric, constants)
        for metric, values in (("pa_epe_cm", (1.4, 1.3)), ("pa_auc", (0.7, 0.8)), ("epe_px", (1.0,)))
        for value in values
    ] == [False, True, False, True, None]


def test_groups_of_images_make_the_intervals(run: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Stretches of frames, a column of the boxes, or what a pattern finds in the names, in place of the poses."""
    names = [f"{film}/{frame:02}.jpg" for film in ("b", "a") for frame in range(5)]
    index = Index("films", tmp_path, names, np.zeros((10, 3), np.float32))
    stretches, films = [0, 0, 0, 0, 1, 1, 1, 1, 2, 2], [1] * 5 + [0] * 5
    for groups, wanted in (("4", stretches), ("^(.*)/", films), ("a/|b", films)):
        assert grouped(index, groups).groups.tolist() == wanted
    for groups, message in (
        ("0", "expected a number"),
        ("(", "expected a number"),
        ("b/", "no such text for a/00"),
        ("", "expected a number"),
    ):
        with pytest.raises(UserError, match=message):
            grouped(index, groups)
    none, pck = cast(Any, None), {"pck_0.1": np.array([[1.0], [1.0], [0.0]])}
    few = Evaluation(none, none, index.select(np.arange(3)), none, Errors(pck, 3, {}))
    assert few.intervals["pck_0.1"][1:] == (0.0, 1.0)  # Student's t reaches beyond
    boxes = tmp_path / "boxes.csv"
    boxes.write_text("\n".join(["file,x0,y0,x1,y1,person", *(f"./{name},0,0,9,9,p{name[:1]}" for name in names)]))
    data = [DataConfig("folder", str(tmp_path), box=str(boxes))]
    assert grouped(index, "person", data).groups.tolist() == films
    boxes.write_text(boxes.read_text().replace("pa", ""))
    with pytest.raises(UserError, match="--groups 'person': no such column, or no such text for a/00"):
        grouped(index, "person", data)
    boxes.write_text(f"{boxes.read_text()}\n{names[0]},9,9,18,18,somebody")
    with pytest.raises(UserError, match="line 12: another 'person' for a hand of the same image"):
        grouped(index, "person", data)
    call(run, tmp_path / "out")
    content = json.loads((tmp_path / "out" / "metrics.json").read_text())
    assert {entry["low"] for entry in content["metrics"].values()} == {None}
    assert "no intervals: the images are 2 groups, expected at least 3" in caplog.messages


def changed(run: Path, *, sources: int = 1, **data: Any) -> PoseRun:
    """The run with other keys of its data, or with its source so many times."""
    loaded = load_pose_run(run)
    tables = to_dict(loaded.config)
    tables["data"] = [{**tables["data"][0], **data}] * sources
    return dataclasses.replace(loaded, config=load_config(FinetuneConfig, [], [], base=tables))


def test_training_data_of_the_run_is_recognised(run: Path, tmp_path: Path) -> None:
    loaded, on_dexter = load_pose_run(run), changed(run, source="dexter_object", split="all")
    link = tmp_path / "another_name"
    link.symlink_to(loaded.config.data[0].root)
    for one, settings, expected in (
        (loaded, [], False),
        (loaded, ["data.split=train"], True),
        (loaded, ["data.split=all"], True),
        (loaded, [f"data.root={link}", "data.split=all"], True),
        (loaded, ["data.split=all", "data.part=evaluation"], False),
        (on_dexter, ["data.part=evaluation"], True),  # a source without parts has no other images
    ):
        assert trained_on(one, evaluation_config(one, [], settings)) is expected, settings


@pytest.mark.parametrize("setting", ["data.part=evaluation", "data.0.part=evaluation", "data.source=dexter_object"])
def test_parts_that_are_not_split_are_used_whole(setting: str, run: Path) -> None:
    """The run's own split is of its training part, and nobody asked for it here."""
    (found,) = evaluation_config(load_pose_run(run), [], [setting]).data
    assert found.split == "all"
    two = evaluation_config(changed(run, sources=2), [], ["data.1.part=evaluation"]).data
    assert [source.split for source in two] == ["val", "all"]


@pytest.mark.parametrize("setting", ["pose.root=middle_mcp", "encoder.name=resnet50", "geometry.side_px=64"])
def test_keys_of_the_network_cannot_be_changed(setting: str, run: Path) -> None:
    key = setting.partition("=")[0].removesuffix(".root")
    with pytest.raises(UserError, match=rf"{key} belongs to the network of .*cannot be changed"):
        evaluation_config(load_pose_run(run), [], [setting])


def test_a_folder_that_cannot_be_written_to_fails_before_the_work(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("peclr_dali.train.evaluation.evaluate.estimate_poses")
    with pytest.raises(OSError, match="/proc/"):
        call(run, Path("/proc"), "data.split=all")


def test_a_submission_holds_what_the_leaderboard_reads(run: Path, hands: Path, tmp_path: Path) -> None:
    """The evaluation part as it is published: without 3D labels."""
    root = tmp_path / "evaluation_only"
    (root / "evaluation" / "rgb").mkdir(parents=True)
    for number in range(5):
        image = (hands / "training" / "rgb" / f"{number:08d}.jpg").read_bytes()
        (root / "evaluation" / "rgb" / f"{number:08d}.jpg").write_bytes(image)
    for key in ("K", "scale"):
        rows = json.loads((hands / f"training_{key}.json").read_text())[:5]
        (root / f"evaluation_{key}.json").write_text(json.dumps(rows))
    settings = (f"data.root={root}", "data.part=evaluation", "data.split=all", "data.box=center")
    write_bad_list(tmp_path / "bad.jsonl", {"evaluation/rgb/00000001.jpg": "too dark"})
    some = ("data.label_fraction=0.4", f"data.bad_list={tmp_path / 'bad.jsonl'}", "data.0.part=training")
    _, written = call(run, tmp_path / "out", *settings, *some, submission=True, crop="two-pass")
    assert [file.name for file in written] == ["pred.json", "pred.zip"]
    with zipfile.ZipFile(tmp_path / "out" / "pred.zip") as archive:
        xyz, vertices = json.loads(archive.read("pred.json"))
    assert np.shape(xyz) == (5, 21, 3)
    assert np.shape(vertices) == (5, 778, 3)
    scale = json.loads((root / "evaluation_scale.json").read_text())
    bones = np.linalg.norm(np.subtract([hand[9] for hand in xyz], [hand[10] for hand in xyz]), axis=1)
    assert bones.max() < 20 * max(scale)  # metres, not reference bones
    with pytest.raises(UserError, match="has no poses to measure against"):
        call(run, tmp_path / "out", *settings)
    (root / "evaluation_scale.json").rename(root / "away.json")
    with pytest.raises(UserError, match="no hand for 5 of 5 images, the first is image 0: its file, its camera"):
        call(run, tmp_path / "out", *settings, submission=True, crop="two-pass", force=True)
    (root / "away.json").rename(root / "evaluation_scale.json")
    (root / "evaluation" / "rgb" / "00000003.jpg").write_bytes(b"broken")
    for crop in ("two-pass", "boxes"):  # the second one would show another image's hand
        with pytest.raises(UserError, match="no hand for 1 of 5 images, the first is image 3"):
            call(run, tmp_path / "out", *settings, submission=True, crop=crop, force=True)


@pytest.mark.parametrize("first_keypoint", ["wrist", "palm"])
def test_two_passes_crop_as_the_authors_code_does(first_keypoint: Literal["wrist", "palm"], run: Path) -> None:
    """The second view shows the rectangle around the first prediction, in whole pixels, at 0.7 of its side.

    So it is in either way to count pixels: from the corner, and as for the authors' networks, which predict the palm.
    """
    knowing, config, index = knowing_run(run)
    network = knowing.network
    assert isinstance(network, Knowing)
    pose, whole = dataclasses.replace(config.pose, first_keypoint=first_keypoint), len(index)
    config = dataclasses.replace(config, pose=pose, validation=dataclasses.replace(config.validation, batch=whole))
    network.joints, network.error = network.joints.repeat(2, 1, 1), network.error.repeat(2, 1, 1)  # two passes
    poses = estimate_in_two_passes(knowing.network, index, index.targets["K"], config, World(), keep_images=2)
    side_px = config.geometry.side_px
    keypoints_px = index.tables["keypoints_px"]
    np.testing.assert_allclose(poses.keypoints_px, keypoints_px, atol=1e-3)
    for row in range(len(index)):
        scale = 0.7 * side_px / (0.33 * tiny_hands.SIDE_PX)  # their first transformation, written out
        first = np.array([[scale, 0, -scale * 32 + side_px / 2], [0, scale, -scale * 32 + side_px / 2], [0, 0, 1]])
        inside = keypoints_px[row] @ first[:2, :2].T + first[:2, 2]
        x1, y1, x2, y2 = (int(edge) for edge in (*inside.min(axis=0), *inside.max(axis=0)))
        corners = np.linalg.inv(first)[:2] @ np.array([[x1, x2], [y1, y2], [1, 1]])
        scale = 0.7 * side_px / (corners[:, 1] - corners[:, 0]).max()
        expected = np.zeros((2, 3))
        expected[:, :2] = scale * np.eye(2)
        expected[:, 2] = side_px / 2 - scale * corners.mean(axis=1)
        np.testing.assert_allclose(poses.source_to_view_px[row], expected, atol=0.1 * scale)
    assert poses.images.shape == (2, side_px, side_px, 3)


def test_another_run_is_measured_with_views_as_in_its_training(run: Path) -> None:
    """With its side and its boxes' margins, of each source that it was trained on."""
    one = load_pose_run(run)
    config = evaluation_config(one, [], ["data.split=all"])
    tables = to_dict(one.config)
    (data,) = tables["data"]
    first, second = {**data, "box_margin": 2.5}, {**data, "root": "elsewhere", "box_margin": 1.75}
    tables["geometry"]["side_px"] = 48
    other, of_two = (
        dataclasses.replace(one, config=load_config(FinetuneConfig, [], [], base={**tables, "data": data}))
        for data in (first, [first, second])
    )
    found = for_other_run(config, other)
    assert found.data == (dataclasses.replace(config.data[0], box_margin=2.5),)
    assert found.geometry.side_px == 48
    mixed = load_config(FinetuneConfig, [], [], base={**tables, "data": [second, data]})
    assert [source.box_margin for source in for_other_run(mixed, of_two).data] == [1.75, 2.5]


@pytest.mark.parametrize("first_keypoint", ["wrist", "palm"])
def test_a_view_of_two_passes_shows_the_picture_where_its_matrix_says(
    first_keypoint: Literal["wrist", "palm"], run: Path, tmp_path: Path
) -> None:
    """A bright square, found in the view, is where the matrix carries it, counted as the network counts pixels."""
    image = np.zeros((100, 100, 3), np.uint8)
    image[43:49, 51:57] = 255  # corner-based middle (54, 46), centre-based (53.5, 45.5)
    cv2.imwrite(str(tmp_path / "square.png"), image)
    loaded = load_pose_run(run)
    config = dataclasses.replace(
        loaded.config, pose=dataclasses.replace(loaded.config.pose, first_keypoint=first_keypoint)
    )
    network = Knowing(loaded.network.encoder, config.pose)
    joints = torch.full((2, 21, 3), 1.0).double()
    joints[:, :, :2] = torch.linspace(-0.07, 0.07, 21).double()[:, None]
    network.know(joints.repeat(2, 1, 1), torch.zeros(4, 21, 3).double())
    index = Index("squares", tmp_path, ["square.png"] * 2, np.zeros((2, 3), np.float32), mirror=np.arange(2) == 1)
    cameras = np.tile(np.array([[80, 0, 52], [0, 80, 47], [0, 0, 1]], np.float32), (2, 1, 1))
    poses = estimate_in_two_passes(network, index, cameras, config, World(), keep_images=2)
    origin_px = 0.0 if first_keypoint == "palm" else 0.5
    for view, crop in zip(poses.images[..., 0].astype(float), poses.source_to_view_px, strict=True):
        ys, xs = np.mgrid[: len(view), : len(view)]
        found = np.array([(xs * view).sum(), (ys * view).sum()]) / view.sum() + origin_px
        expected = crop[:, :2] @ (np.array([53.5, 45.5]) + origin_px) + crop[:, 2]
        np.testing.assert_allclose(found, expected, atol=0.05)
