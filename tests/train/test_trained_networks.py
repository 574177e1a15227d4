"""The networks in networks/ are what their recipes say, and of use on hands that they have not seen."""

import csv
import dataclasses
import json
import math
import statistics
import subprocess
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from peclr_dali.errors import UserError
from peclr_dali.models.config import PoseConfig
from peclr_dali.models.encoders import build_encoder
from peclr_dali.synthetic.dataset import make_dataset
from peclr_dali.train.config.finetuning import FinetuneConfig
from peclr_dali.train.config.load import load_config
from peclr_dali.train.config.pretraining import Config
from peclr_dali.train.evaluation.evaluate import evaluate
from peclr_dali.train.pose.pose_run import load_pose_run, start_pose_network
from peclr_dali.train.runs.folder import RunFolder
from tests.conftest import Record

ROOT = Path(__file__).parents[2]
NETWORK = ROOT / "networks" / "hand_photos_rn18.safetensors"
SIGNS, PHOTOGRAPH_PX = ROOT / ".data" / "sign_digits", 100
OTHER_SEED = 7
"""Other poses and other scenes than those of training, which have seed 1."""


def errors(data: Path, out: Path, *settings: str, worst: int = 1) -> dict[str, list[float]]:
    """Errors of the network on each labelled image of a dataset, by metric."""
    overrides = [f"data.root={data}", "data.split=all", "train.device=cpu", *settings]
    evaluate(
        [NETWORK], [], overrides, out=out, compare=[], crop="boxes", worst=worst, submission=False,
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


def test_it_has_the_configuration_of_its_recipe() -> None:
    recipe = load_config(FinetuneConfig, [NETWORK.with_suffix(".toml")], [])
    found = load_pose_run(NETWORK)
    assert (found.config.encoder.name, found.config.pose) == (recipe.encoder.name, recipe.pose)
    assert found.config.geometry.side_px == recipe.geometry.side_px
    assert found.box_margin == recipe.data[0].box_margin
    assert NETWORK.stat().st_size <= 25e6


def test_training_starts_from_the_encoder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """By its path and, from any folder, by its name; its size and encoder are those of the recipe."""
    recipe = load_config(Config, [ROOT / "networks" / "peclr_rn18.toml"], [])
    file = ROOT / "networks" / "peclr_rn18.safetensors"
    assert file.stat().st_size <= 25e6
    monkeypatch.chdir(tmp_path)
    of_file = load_file(file)
    for weights in (str(file), "peclr_rn18"):
        encoder = dataclasses.replace(recipe.encoder, weights=weights)
        start = start_pose_network(encoder, PoseConfig(), 48)
        assert Path(start.origin).name == file.name
        for built in (start.network.encoder, build_encoder(encoder, 48)):
            torch.testing.assert_close(
                built.library_state_dict()["layer1.0.conv1.weight"], of_file["layer1.0.conv1.weight"].float()
            )
    with pytest.raises(UserError, match=r"encoder.weights = 'peclr_rn19' does not exist"):
        start_pose_network(dataclasses.replace(recipe.encoder, weights="peclr_rn19"), PoseConfig(), 48)


def test_it_finds_hands_that_it_has_not_seen(tmp_path: Path) -> None:
    make_dataset(tmp_path / "hands", poses=4, seed=OTHER_SEED, scenes=8, workers=1)
    found = errors(tmp_path / "hands", tmp_path / "out")
    assert statistics.mean(found["pa_epe_cm"]) < 1.4  # one rigid hand, aligned to each: 1.5
    assert statistics.median(found["epe_px"]) < 8  # the mean is 18: some of the 16 images are far off


@pytest.mark.slow
def test_its_errors_on_many_hands(tmp_path: Path, record: Record) -> None:
    """1,600 images of 400 poses before 400 scenes; the row of networks/README.md."""
    make_dataset(tmp_path / "hands", poses=400, seed=OTHER_SEED, scenes=400)
    figures = summary(errors(tmp_path / "hands", tmp_path / "out"), tmp_path / "out")
    record("networks", network=NETWORK.name, measured_on="1,600 images of 400 hands and scenes of their own", **figures)
    assert figures["pa_epe_cm"] <= 1.3
    assert figures["median_epe_px"] <= 8


@pytest.mark.slow
def test_its_distance_from_the_landmarks_of_photographs(tmp_path: Path, record: Record) -> None:
    """The photographs of `make photographs`. The landmarks are MediaPipe's: another network's output, not labels."""
    boxes = SIGNS / "fold_0" / "held_out.csv"
    if not boxes.exists():
        pytest.skip(f"{SIGNS} does not hold the photographs: make photographs fetches them")
    found = errors(SIGNS / "images", tmp_path, "data.source=folder", f"data.box={boxes}", worst=10)
    figures = summary(found, tmp_path, PHOTOGRAPH_PX)
    measured_on = "436 hands in photographs of digits of people held out, against MediaPipe's landmarks"
    record("networks", network=NETWORK.name, measured_on=measured_on, **figures)
    assert figures["images"] == 436
    assert figures["median_epe_px"] < 6
    assert figures["median_epe_px"] < 0.6 * figures["mean_keypoints_epe_px"]


@pytest.mark.slow
def test_the_demo_shows_what_pretraining_gives(tmp_path: Path, record: Record) -> None:
    """`make demo` in a fresh clone, from the set-up to the report. The time is recorded, not judged."""
    clone = tmp_path / "clone"
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
    began_s = time.monotonic()
    subprocess.run(["make", "demo"], cwd=clone, check=True)
    minutes = (time.monotonic() - began_s) / 60
    out = clone / "runs" / "from_pretrained" / "evaluation"
    figures, comparison = summary(read_errors(out), out), json.loads((out / "metrics.json").read_text())["comparison"]
    difference = comparison["difference"]["epe_px"]
    figures |= {f"difference_{name}": round(value, 2) for name, value in difference.items()}
    figures["scratch_epe_px"] = round(comparison["other"]["metrics"]["epe_px"]["value"], 2)
    record("networks", network="make demo", measured_on="80 hands", minutes=round(minutes, 2), **figures)
    assert "“from_pretrained” is better than “from_scratch”: " in (clone / "runs" / "report.html").read_text()
    assert difference["high"] < 0
    first, *_, last = RunFolder(clone / "runs" / "demo", keep=1).read_validations()
    assert last["epe_px_of_224"] < min(first["epe_px_of_224"], last["constant_epe_px_of_224"]) - 2
    metrics = (clone / "runs" / "demo" / "metrics.jsonl").read_text().splitlines()
    assert json.loads(metrics[-1])["loss"] < math.log(2 * 256 - 1) - 1  # chance: each of 511 embeddings as near
    assert figures["epe_px"] < 0.9 * figures["mean_keypoints_epe_px"]
    drawn = errors(
        clone / ".data" / "hands", tmp_path / "drawn", "data.part=evaluation"
    )  # of the network that predicts
    assert statistics.mean(drawn["pa_epe_cm"]) <= 2.4
    assert statistics.mean(drawn["epe_px"]) <= 15
