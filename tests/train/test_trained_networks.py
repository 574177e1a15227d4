"""The networks in networks/ are what their recipes say, and of use on rendered hands that they have not seen."""

from __future__ import annotations

import csv
import dataclasses
import json
import statistics
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from peclr_dali.errors import UserError
from peclr_dali.pipelines.config import each_source
from peclr_dali.pipelines.sources.boxes import read_boxes
from peclr_dali.synthetic import make_dataset
from peclr_dali.train.config.finetuning import FinetuneConfig
from peclr_dali.train.config.load import load_config
from peclr_dali.train.config.pretraining import Config
from peclr_dali.train.evaluation.evaluate import evaluate
from peclr_dali.train.pose.pose_run import load_pose_run
from peclr_dali.train.pose.predict import predict
from peclr_dali.train.pose.predictions import read_predictions
from peclr_dali.train.runs.folder import RunFolder
from peclr_dali.train.weights.starting_weights import start_pose_network
from tests.conftest import Record

ROOT = Path(__file__).parents[2]
RENDERED, PHOTOGRAPHS = (ROOT / "networks" / f"{name}.safetensors" for name in ("hand_rn18", "hand_photos_rn18"))
"""The first was trained on rendered hands, the second on photographs of digits too."""
SIGNS, PHOTOGRAPH_PX = ROOT / ".data" / "sign_digits", 100
DAILY = ROOT / ".data" / "opencv_doc"
DAILY_PHOTOGRAPHS = (
    "Back_Projection_Theory0.jpg", "Threshold_inRange_Tutorial_Result_input.jpeg", "fileListImage.jpg", "frame.jpg",
    "grabcut_rect.jpg", "handSrc.jpg", "messi5.jpg", "right04.jpg", "screen_charuco.jpg",
)  # fmt: skip
"""Those in which find_boxes.py finds a hand, without drawings and without copies of one of them."""
OTHER_SEED = 7
"""Other poses and other scenes than those of training, which have seed 1."""


def errors(network: Path, data: Path, out: Path, *settings: str, worst: int = 1) -> dict[str, list[float]]:
    """Errors of the network on each labelled image of a dataset, by metric."""
    overrides = [f"data.root={data}", "data.split=all", "train.device=cpu", *settings]
    evaluate(
        network, [], overrides, out=out, compare=None, crop="boxes", worst=worst, submission=False,
        proper_rotation=False,
    )  # fmt: skip
    return read_errors(out)


def read_errors(out: Path) -> dict[str, list[float]]:
    with (out / "poses.csv").open() as opened:
        rows = list(csv.DictReader(opened))
    return {name: [float(row[name]) for row in rows] for name in rows[0] if name in ("pa_epe_cm", "epe_px")}


def summary(found: dict[str, list[float]], out: Path, side_px: int = 224) -> dict[str, float]:
    """Figures of a row; pixels are those of images of 224 px, from images of `side_px`."""
    constants = json.loads((out / "metrics.json").read_text())["constants"]
    errors_px = [error_px * 224 / side_px for error_px in found["epe_px"]]
    figures = {
        "images": len(errors_px),
        "epe_px": round(statistics.mean(errors_px), 2),
        "median_epe_px": round(statistics.median(errors_px), 2),
        "mean_keypoints_epe_px": round(constants["mean_keypoints"]["epe_px"] * 224 / side_px, 2),
    }
    if "pa_epe_cm" in found:
        figures["pa_epe_cm"] = round(statistics.mean(found["pa_epe_cm"]), 3)
        figures["rigid_pose_pa_epe_cm"] = round(constants["rigid_pose"]["pa_epe_cm"], 3)
    return figures


@pytest.mark.parametrize("network", [RENDERED, PHOTOGRAPHS])
def test_it_has_the_configuration_of_its_recipe(network: Path) -> None:
    recipe = load_config(FinetuneConfig, [network.with_suffix(".toml")], [])
    first = dataclasses.replace(recipe, data=each_source(recipe.data)[0])  # of several sources the file names one
    assert load_pose_run(network).config == first
    assert network.stat().st_size <= 25e6


def test_fine_tuning_starts_from_the_encoder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """By its path and, from any folder, by its name; its size and encoder are those of the recipe."""
    recipe = load_config(Config, [ROOT / "networks" / "peclr_rn18.toml"], [])
    demo = load_config(FinetuneConfig, [ROOT / "configs" / "finetune_demo.toml"], [])
    assert (recipe.encoder.name, recipe.geometry.side_px) == (demo.encoder.name, demo.geometry.side_px)
    assert (ROOT / demo.encoder.weights).stat().st_size <= 25e6
    monkeypatch.chdir(tmp_path)
    of_file = load_file(ROOT / demo.encoder.weights)
    for weights in (demo.encoder.weights, "peclr_rn18"):
        encoder = dataclasses.replace(demo.encoder, weights=weights)
        start = start_pose_network(encoder, demo.pose, 48)
        assert Path(start.origin).name == "peclr_rn18.safetensors"
        state = start.network.encoder.library_state_dict()
        torch.testing.assert_close(state["layer1.0.conv1.weight"], of_file["layer1.0.conv1.weight"].float())
    with pytest.raises(UserError, match=r"encoder.weights = 'peclr_rn19' does not exist"):
        start_pose_network(dataclasses.replace(demo.encoder, weights="peclr_rn19"), demo.pose, 48)


@pytest.mark.parametrize("network", [RENDERED, PHOTOGRAPHS])
def test_it_finds_hands_that_it_has_not_seen(network: Path, tmp_path: Path) -> None:
    make_dataset(tmp_path / "hands", poses=4, seed=OTHER_SEED, scenes=8, workers=1)
    found = errors(network, tmp_path / "hands", tmp_path / "out")
    assert statistics.mean(found["pa_epe_cm"]) < 1.4  # one rigid hand, aligned to each: 1.5
    assert statistics.median(found["epe_px"]) < 8  # the mean is 18: some of the 16 images are far off


@pytest.mark.slow
@pytest.mark.parametrize("network", [RENDERED, PHOTOGRAPHS])
def test_its_errors_on_many_hands(network: Path, tmp_path: Path, record: Record) -> None:
    """1,600 images of 400 poses before 400 scenes; the row of networks/README.md."""
    poses = scenes = 400
    make_dataset(tmp_path / "hands", poses=poses, seed=OTHER_SEED, scenes=scenes)
    found = errors(network, tmp_path / "hands", tmp_path / "out")
    figures = summary(found, tmp_path / "out")
    record("networks", network=network.name, measured_on="1,600 images of 400 hands and scenes of their own", **figures)
    assert figures["pa_epe_cm"] <= 1.3
    assert figures["median_epe_px"] <= 8


@pytest.mark.slow
@pytest.mark.parametrize(
    ("network", "boxes", "images", "people", "median_px"),
    [(RENDERED, "boxes.csv", 2063, "", 14), (RENDERED, "fold_0/held_out.csv", 436, " of people held out", 14),
     (PHOTOGRAPHS, "fold_0/held_out.csv", 436, " of people held out", 6)],
)  # fmt: skip
def test_its_distance_from_the_landmarks_of_photographs(
    network: Path, boxes: str, images: int, people: str, median_px: float, tmp_path: Path, record: Record
) -> None:
    """The photographs of `make photographs`. The landmarks are MediaPipe's: another network's output, not labels."""
    if not (SIGNS / boxes).exists():
        pytest.skip(f"{SIGNS} does not hold the photographs: make photographs fetches them")
    found = errors(network, SIGNS / "images", tmp_path, "data.source=folder", f"data.box={SIGNS / boxes}", worst=10)
    figures = summary(found, tmp_path, PHOTOGRAPH_PX)
    for limit_px in (11, 20):
        figures[f"share_below_{limit_px}_px"] = round(
            statistics.mean(error_px * 224 / PHOTOGRAPH_PX < limit_px for error_px in found["epe_px"]), 3
        )
    measured_on = f"{images:,} hands in photographs of digits{people}, against MediaPipe's landmarks"
    record("networks", network=network.name, measured_on=measured_on, **figures)
    assert figures["images"] == images
    assert figures["median_epe_px"] < median_px
    assert figures["median_epe_px"] < 0.6 * figures["mean_keypoints_epe_px"]


@pytest.mark.slow
@pytest.mark.parametrize(("network", "median_px"), [(RENDERED, 45), (PHOTOGRAPHS, 30)])
def test_its_distance_on_hands_of_daily_life(network: Path, median_px: float, tmp_path: Path, record: Record) -> None:
    """Photographs of Debian's package opencv-doc, against MediaPipe's landmarks, in pixels of a square of 224."""
    if not (DAILY / "boxes.csv").exists():
        pytest.skip(f"{DAILY} does not hold images/ and boxes.csv: unpack opencv-doc's JPEGs, and run find_boxes.py")
    header, *lines = (DAILY / "boxes.csv").read_text().splitlines(keepends=True)
    boxes = tmp_path / "boxes.csv"
    boxes.write_text(header + "".join(line for line in lines if line.split(",")[0] in DAILY_PHOTOGRAPHS))
    hands = read_boxes(boxes, DAILY_PHOTOGRAPHS)
    assert hands.image.tolist() == list(range(len(DAILY_PHOTOGRAPHS)))  # each has one hand
    assert hands.keypoints_px is not None
    predict(network, [str(DAILY / "images")], tmp_path / "out", boxes=boxes)
    predicted, wanted = np.zeros_like(hands.keypoints_px), np.zeros_like(hands.keypoints_px)  # in the square
    for found in read_predictions(tmp_path / "out"):
        row = DAILY_PHOTOGRAPHS.index(Path(found["image"]).name)
        x0, y0, x1, _ = found["box_px"]
        for points, points_px in ((predicted, found["keypoints_px"]), (wanted, hands.keypoints_px[row])):
            points[row] = (np.array(points_px) - [x0, y0]) * 224 / (x1 - x0)
            if found["mirrored"]:
                points[row, :, 0] = 224 - points[row, :, 0]
    assert predicted.any(axis=(1, 2)).all()
    distance, constant = (
        np.linalg.norm(points - wanted, axis=2).mean(axis=1) for points in (predicted, wanted.mean(axis=0))
    )
    along, true = (
        points[:, 9] - points[:, 0] for points in (predicted, wanted)
    )  # from the wrist to the middle knuckle
    turned_deg = np.degrees(np.arctan2(along[:, 1], along[:, 0]) - np.arctan2(true[:, 1], true[:, 0]))
    figures = {
        "images": len(distance),
        "epe_px": round(float(distance.mean()), 2),
        "median_epe_px": round(float(np.median(distance)), 2),
        "mean_keypoints_epe_px": round(float(constant.mean()), 2),
        "within_15_degrees": int((np.abs((turned_deg + 180) % 360 - 180) < 15).sum()),
    }
    measured_on = f"{len(distance)} hands in photographs of opencv-doc, against MediaPipe's landmarks"
    record("networks", network=network.name, measured_on=measured_on, **figures)
    assert figures["median_epe_px"] < median_px


@pytest.mark.slow
def test_the_demo_shows_what_pretraining_gives(tmp_path: Path, record: Record) -> None:
    """`make demo` in a fresh clone, from the set-up to the report. The time is recorded, not judged."""
    clone = tmp_path / "clone"
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
    began_s = time.monotonic()
    subprocess.run(["make", "demo"], cwd=clone, check=True)
    minutes = (time.monotonic() - began_s) / 60
    out = clone / "runs" / "finetune_demo" / "evaluation"
    figures, comparison = summary(read_errors(out), out), json.loads((out / "metrics.json").read_text())["comparison"]
    difference = comparison["difference"]["epe_px"]
    figures |= {f"difference_{name}": round(value, 2) for name, value in difference.items()}
    figures["scratch_epe_px"] = round(comparison["other"]["metrics"]["epe_px"]["value"], 2)
    record("networks", network="make demo", measured_on="80 hands", minutes=round(minutes, 2), **figures)
    assert "“pre-trained” is better than “from scratch”: " in (clone / "runs" / "report.html").read_text()
    assert difference["high"] < 0
    first, *_, last = RunFolder(clone / "runs" / "demo", keep=1).read_probes()
    assert last["epe_px_of_224"] < first["epe_px_of_224"] - 2
    assert figures["epe_px"] < 0.75 * figures["mean_keypoints_epe_px"]
    drawn = errors(
        RENDERED, clone / ".data" / "hands", tmp_path / "drawn", "data.part=evaluation"
    )  # the network that predicts
    assert statistics.mean(drawn["pa_epe_cm"]) <= 2.4
    assert statistics.mean(drawn["epe_px"]) <= 15
