"""The classifier of frozen features: its splits, its constants, and the whole way from pictures to the page."""

from __future__ import annotations

import csv
import json
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from peclr_dali.bench.classification.classify import accuracies, draw_groups, predict
from peclr_dali.bench.classification.documents import draw_photographs
from peclr_dali.bench.classification.encoders import features_of, load_frozen
from peclr_dali.bench.classification.labels import Labels, read_labels, splits
from peclr_dali.bench.classification.neighbours import COUNT, GAP_PX, SIDE_PX, save_neighbours
from peclr_dali.errors import UserError
from peclr_dali.models.network import Normalize
from peclr_dali.pipelines.config import DataConfig, each_source
from peclr_dali.pipelines.sources import load_index
from peclr_dali.train.runs.pictures import read_sheet
from tests.command_line import run_cli
from tests.conftest import Record
from tests.train.narrow import narrow_resnet18
from tools import sign_digits


@pytest.fixture(scope="module", autouse=True)
def narrow() -> Iterator[None]:
    with narrow_resnet18():
        yield


ROOT = Path(__file__).parents[2]
PEOPLE, DIGITS = 6, (0, 9)


def draw(file: Path, person: int, digit: int) -> None:
    """A ring for 0, bars for 9, in the person's colour and place."""
    rng = np.random.default_rng((person, digit))
    image = np.full((48, 48, 3), rng.integers(150, 250), np.uint8)
    colour = [int(part) for part in rng.integers(0, 120, 3)]
    x, y = (int(part) for part in rng.integers(20, 28, 2))
    if digit == 0:
        cv2.circle(image, (x, y), 12, colour, 4)
    else:
        for left in (-10, 0, 10):
            cv2.line(image, (x + left, y - 14), (x + left, y + 14), colour, 3)
    file.parent.mkdir(parents=True, exist_ok=True)
    cv2.imwrite(str(file), image)


@pytest.fixture(scope="module")
def signs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dozen drawn pictures, prepared as `make photographs` prepares photographs; their boxes are given."""
    checkout, folder = tmp_path_factory.mktemp("checkout"), tmp_path_factory.mktemp("signs")
    lines = ["file,x0,y0,x1,y1,hand,confidence"]
    for number in range(PEOPLE * len(DIGITS)):
        name = f"{DIGITS[number % 2]}/IMG_{1000 + number}.JPG"
        draw(checkout / "Dataset" / name, number // 2, DIGITS[number % 2])
        lines.append(f"{name},8,8,40,40,right,0.9")
    sign_digits.fetch(folder, checkout)
    (folder / "boxes.csv").write_text("\n".join(lines) + "\n")
    sign_digits.split(folder, 0)
    return folder


@pytest.fixture(scope="module")
def run(signs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pre-trained as configs/photographs.toml says, on the people that are not held out."""
    out = tmp_path_factory.mktemp("runs") / "photographs"
    overrides = [
        f"data.root={signs / 'images'}", f"data.box={signs / 'fold_0' / 'boxes.csv'}", "geometry.side_px=32",
        "train.batch=4", "train.micro_batch=2", "train.epochs=2", "optim.warmup_epochs=1", "train.threads=1",
        "pipelines.threads=1", "projector.hidden=16", "projector.dim=8", "train.device=cpu", "run.log_every=1",
    ]  # fmt: skip
    settings = [word for override in overrides for word in ("--set", override)]
    assert run_cli("pretrain", "-c", str(ROOT / "configs" / "photographs.toml"), *settings, "--out", str(out)) == 0
    return out


def classified(run: Path, signs: Path, out: Path, *arguments: str) -> dict[str, Any]:
    images, box = str(signs / "images"), str(signs / "boxes.csv")
    assert run_cli("classify", str(run), "--images", images, "--box", box, *arguments, "--out", str(out)) == 0
    row: dict[str, Any] = json.loads((out / "classification.json").read_text())
    return row


def test_the_whole_way_to_the_page(run: Path, signs: Path, tmp_path: Path) -> None:
    table, out, rows = signs / "fold_0" / "labels.csv", tmp_path / "digits", tmp_path / "rows.jsonl"
    arguments = ["--labels", str(table), "--groups", "person", "--few", "2,3", "--record", str(rows)]
    row = classified(run, signs, out, *arguments)
    assert json.loads(rows.read_text()) == row
    counts = {key: row[key] for key in ("samples", "tested", "groups", "groups_tested", "split")}
    assert counts == {"samples": 12, "tested": 4, "groups": 6, "groups_tested": 2, "split": "parts"}
    assert [entry["name"] for entry in row["encoders"]] == ["constant", str(run), "random", "pixels"]
    trained = row["encoders"][1]
    assert (trained["trained"], trained["variant"], trained["trained_on_tested"]) == ("pre-training", "paper", 0)
    assert np.array(trained["confusion"]).sum(axis=1).tolist() == [2, 2]
    assert [len(shares) for shares in trained["few"].values()] == [10, 10]
    with (out / "predictions.csv").open() as file:
        lines = list(csv.DictReader(file))
    held_out = [f"{digit}/IMG_{1000 + number}.JPG" for digit, number in ((0, 0), (9, 1), (0, 10), (9, 11))]
    assert sorted(line["file"] for line in lines) == sorted(held_out)
    right = np.mean([line["label"] == line[str(run)] for line in lines])
    assert trained["accuracy"]["value"] == right
    pairs = [(line["label"], line[str(run)]) for line in lines]
    assert trained["confusion"] == [[pairs.count((true, predicted)) for predicted in "09"] for true in "09"]
    assert trained["steps"] == 4  # two epochs of 8 images in batches of 4

    page = tmp_path / "page.html"
    assert run_cli("report", str(run), "--classification", str(out), "--out", str(page)) == 0
    text = page.read_text()
    for part in ("Classes from frozen features", "Nearest neighbours", "With few labels", "What the network saw"):
        assert part in text
    assert f"{right:.1%}" in text


def test_people_of_pre_training_in_the_test_are_counted(run: Path, signs: Path, tmp_path: Path) -> None:
    row = classified(run, signs, tmp_path / "out", "--groups", "IMG_([0-9]+)", "--folds", "2")
    assert row["encoders"][1]["trained_on_tested"] == 8  # four people of six
    assert (row["split"], row["tested"]) == ("2 folds", 12)


def test_features_are_those_of_the_encoder(run: Path, signs: Path) -> None:
    index = load_index(DataConfig("folder", str(signs / "images"), box=str(signs / "boxes.csv"), box_margin=1.0))
    trained, random, pixels = load_frozen([str(run)])
    readable, features, views = features_of(trained, index, lambda done, total: None)
    assert readable.all()
    margin = each_source(trained.config.data)[0].box_margin
    assert margin > 1
    picture = cv2.imread(str(index.root / index.paths[0]))
    assert picture is not None
    differences = []
    for factor in (margin, 1.0):
        side_px = 32 * factor  # the boxes are 8 to 40
        scale = views.shape[1] / side_px
        to_view = np.array([[scale, 0, (16 - 24 / factor)], [0, scale, (16 - 24 / factor)]])
        crop = cv2.warpAffine(picture, to_view, views.shape[1:3], borderMode=cv2.BORDER_REPLICATE)[4:-4, 4:-4, ::-1]
        differences.append(np.abs(views[0, 4:-4, 4:-4].astype(int) - crop).mean())
    assert differences[0] < 0.5 * differences[1]
    images = torch.from_numpy(views).permute(0, 3, 1, 2)
    assert trained.encoder is not None
    with torch.inference_mode():
        expected = trained.encoder(Normalize()(images))
    np.testing.assert_allclose(features, expected.numpy(), atol=1e-5)
    np.testing.assert_array_equal(features_of(pixels, index, lambda *_: None)[1], images.flatten(1).float())
    assert np.abs(features_of(random, index, lambda *_: None)[1] - features).max() > 1e-3


def test_an_image_that_cannot_be_read_is_left_out(run: Path, signs: Path, tmp_path: Path) -> None:
    for file in (signs / "images").rglob("*.JPG"):
        copy = tmp_path / "images" / file.relative_to(signs / "images")
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(file.read_bytes()[: 200 if file.name == "IMG_1004.JPG" else None])
    images, out = str(tmp_path / "images"), tmp_path / "out"
    assert run_cli("classify", str(run), "--images", images, "--folds", "2", "--out", str(out)) == 0
    row = json.loads((out / "classification.json").read_text())
    assert (row["samples"], row["tested"]) == (11, 11)
    assert "IMG_1004" not in (out / "predictions.csv").read_text()


def labels_of(label: Sequence[int], group: Sequence[int]) -> Labels:
    classes = [str(number) for number in range(max(label) + 1)]
    return Labels(classes, np.array(label), np.array(group), None)


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 7)), min_size=12, max_size=60), st.integers(2, 4))
def test_a_group_is_never_on_both_sides(pairs: list[tuple[int, int]], folds: int) -> None:
    label, group = map(list, zip(*pairs, strict=True))
    labels = labels_of(np.unique(label, return_inverse=True)[1].tolist(), group)
    try:
        cuts = splits(labels, folds)
    except UserError:
        assume(False)
    for fitted, tested in cuts:
        assert not set(labels.group[fitted]) & set(labels.group[tested])
    everything = np.concatenate([tested for _, tested in cuts])
    assert sorted(everything.tolist()) == list(range(len(pairs)))


@pytest.mark.parametrize("model", ["linear", "nearest"])
def test_what_the_features_tell_is_predicted_and_nothing_else(model: str) -> None:
    rng = np.random.default_rng(0)
    labels = labels_of([0, 1, 2] * 40, [row // 3 for row in range(120)])
    cuts = splits(labels, 5)
    clear = np.eye(3, dtype=np.float32)[labels.label] + rng.normal(0, 0.05, (120, 3)).astype(np.float32)
    np.testing.assert_array_equal(predict(model, clear, labels, cuts), labels.label)
    noise = rng.normal(size=(120, 3)).astype(np.float32)
    assert (predict(model, noise, labels, cuts) == labels.label).mean() < 0.55  # a third, and five deviations


def test_the_constant_is_the_most_frequent_class_of_the_fitted() -> None:
    labels = labels_of([0] * 30 + [1] * 10, list(range(40)))
    fitted, tested = np.arange(25), np.arange(25, 40)  # 25 of class 0 are fitted
    predicted = predict("constant", np.zeros((40, 1), np.float32), labels, [(fitted, tested)])
    assert predicted.tolist() == [-1] * 25 + [0] * 15
    assert accuracies({"constant": predicted}, labels, tested)["constant"]["value"] == pytest.approx(1 / 3)


def test_few_groups_are_drawn_from_the_fitted_ones() -> None:
    labels = labels_of([0, 1] * 30, [row // 2 for row in range(60)])
    cut = splits(labels, 5)[0]
    draws = draw_groups(3, labels, cut)
    for rows, tested in draws:
        assert tested is cut[1]
        assert len(np.unique(labels.group[rows])) == 3
        assert len(rows) == 6
        assert set(rows) <= set(cut[0])
    assert len({tuple(rows) for rows, _ in draws}) > 5


def test_the_interval_is_over_groups() -> None:
    """Ten groups that are right or wrong as a whole: an interval over single samples would be much narrower."""
    labels = labels_of([0, 1] * 100, [row // 20 for row in range(200)])
    predicted = np.where(labels.group % 2 == 0, labels.label, 1 - labels.label)
    found = accuracies({"accuracy": predicted}, labels, np.arange(200))["accuracy"]
    assert found["value"] == 0.5
    assert found["high"] - found["low"] > 0.5  # over samples: 0.14


def test_neighbours_are_the_nearest_of_other_groups(tmp_path: Path) -> None:
    """Two classes, each image grey as its place; "after" tells the classes apart, "before" does the opposite."""
    label = np.array([0, 1] * 20)
    labels = labels_of(label.tolist(), list(range(40)))
    views = np.repeat(np.arange(40, dtype=np.uint8)[:, None, None, None] * 6, 3, axis=3).repeat(8, 1).repeat(8, 2)
    angle = np.where(label == 0, 0.0, 1.0) + np.arange(40) / 1000
    after = np.stack([np.cos(angle), np.sin(angle)], axis=1).astype(np.float32)
    fitted, tested = np.arange(4, 40), np.arange(4)
    before = after.copy()
    before[tested] = after[[1, 0, 3, 2]]
    save_neighbours(tmp_path / "sheet.png", views, (before, after), labels, fitted, tested)
    strips = read_sheet(tmp_path / "sheet.png", height=SIDE_PX, width=(1 + 2 * COUNT) * SIDE_PX + 2 * GAP_PX)
    strip = strips[0].astype(int)
    row_px, width_px = SIDE_PX // 2, SIDE_PX
    frames = {"before": [], "after": []}  # type: dict[str, list[bool]]
    for place in range(COUNT):
        for name, start_px in (("before", width_px + GAP_PX), ("after", (1 + COUNT) * width_px + 2 * GAP_PX)):
            red, green, _ = strip[row_px, start_px + place * width_px + 1]
            frames[name].append(bool(green > red))
    assert frames == {"before": [False] * COUNT, "after": [True] * COUNT}
    query = strip[row_px, width_px // 2, 0] // 6
    first = strip[row_px, (1 + COUNT) * width_px + 2 * GAP_PX + width_px // 2, 0] / 6
    assert query in tested
    assert first == pytest.approx(4, abs=1)  # the nearest of the fitted ones of class 0


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    for number in range(8):
        draw(tmp_path / "photos" / f"c{number % 2}" / f"p{number // 2}_{number}.jpg", number // 2, 9 * (number % 2))
    return tmp_path / "photos"


LINES = [f"c{number % 2}/p{number // 2}_{number}.jpg,{number % 2},p{number // 2}" for number in range(8)]
HEAD = "file,label,person"


@pytest.mark.parametrize(
    ("lines", "arguments", "message"),
    [
        (None, ["--groups", "p[0-9]"], "does not match c0/p0_0.jpg with one part in parentheses"),
        (None, ["--groups", "(x[0-9])"], "does not match c0/p0_0.jpg"),
        (None, ["--groups", "(p"], "no regular expression"),
        (None, ["--folds", "5"], "has 4 images, and there are 8 groups"),
        (None, ["--groups", "(p[0-9])", "--folds", "2", "--few", "3"], "there are 2 groups to fit on"),
        (None, ["--folds", "2", "--few", "1"], "only one class"),
        (None, ["--few", "2,x"], "expected numbers of groups"),
        ([HEAD, *(line.replace(",0,", ",1,") for line in LINES)], [], "have the label '1'"),
        (["file,person", *LINES], [], "no column 'label'"),
        ([HEAD, *LINES, LINES[0]], [], "line 10: c0/p0_0.jpg has a label already"),
        ([HEAD, "c0/other.jpg,0,p0"], [], "there is no image 'c0/other.jpg'"),
        ([HEAD, *LINES, f"./{LINES[0]}"], [], "line 10: c0/p0_0.jpg has a label already"),
        ([HEAD, *LINES[:7], "c1/p3_7.jpg,1, "], ["--groups", "person"], "c1/p3_7.jpg has no person"),
        ([HEAD, "c0/p0_0.jpg,,p0"], [], "line 2: the label is empty"),
        ([f"{HEAD},part", *(f"{line},val" for line in LINES)], [], "line 2: part is 'val'"),
        ([f"{HEAD},part", *(f"{line},test" for line in LINES)], [], "no image of it is left to fit on"),
        (
            [f"{HEAD},part", *(f"{line},{'test' if number < 3 else 'train'}" for number, line in enumerate(LINES))],
            ["--groups", "person"], "group 'p1' is in both parts",
        ),
        (
            [f"{HEAD},part", *(f"{line},{('train', 'test')[number % 2]}" for number, line in enumerate(LINES))],
            [], "label '1' is tested, but no image of it is left to fit on",
        ),
    ],
)  # fmt: skip
def test_wrong_labels_are_one_line(
    lines: list[str] | None, arguments: list[str], message: str, photos: Path, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    table = []
    if lines is not None:
        (tmp_path / "labels.csv").write_text("\n".join(lines) + "\n")
        table = ["--labels", str(tmp_path / "labels.csv")]
    assert run_cli("classify", "run", "--images", str(photos), *table, *arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert message in error


def test_wrong_folders_are_one_line(photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli("classify", str(tmp_path / "run"), "--images", str(photos), "--folds", "2") == 2
    assert run_cli("classify", "imagenet", "--images", str(photos), "--folds", "2") == 2
    assert run_cli("classify", "run", "--images", str(tmp_path / "nothing")) == 2
    assert run_cli("classify", "run", "--images", str(photos / "c0")) == 2
    (tmp_path / "classification.json").write_text("{}")
    message = capsys.readouterr().err.splitlines()
    assert len(message) == 4
    for line, part in zip(
        message, ["run does not exist", "expected a run too", "nothing: does not exist", "is in no folder of a class"],
        strict=True,
    ):  # fmt: skip
        assert part in line


@pytest.mark.parametrize(
    ("out", "message"),
    [
        ("photos/out", "photos/out is within data.root = "),
        ("mine", "exists, and the folder holds no results of classify, which would replace it: name another folder"),
    ],
)
def test_an_output_folder_that_is_not_ours_is_refused(
    out: str, message: str, photos: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mine = photos.parent / "mine" / "predictions.csv"
    mine.parent.mkdir()
    mine.write_text("mine")
    for found in (None, "[]", '{"bench": "train"}'):
        if found is not None:
            (mine.parent / "classification.json").write_text(found)
        assert run_cli("classify", "run", "--images", str(photos), "--out", str(photos.parent / out)) == 2
        assert message in capsys.readouterr().err
    assert mine.read_text() == "mine"
    assert not (photos / "out").exists()


def test_a_run_with_the_name_of_a_baseline_is_refused() -> None:
    with pytest.raises(UserError, match=r"write \./random"):
        load_frozen(["random"])


def test_a_part_of_the_images_may_have_labels_with_spaces_around_cells(photos: Path, tmp_path: Path) -> None:
    lines = [line.replace(",", " , ") if number % 2 else line for number, line in enumerate(LINES[2:])]
    (tmp_path / "labels.csv").write_text("\n".join([HEAD, *lines]) + "\n")
    index = load_index(DataConfig("folder", str(photos)))
    labelled, labels = read_labels(index, tmp_path / "labels.csv", "person")
    assert list(labelled.paths) == sorted(line.split(",")[0] for line in LINES[2:])
    assert labels.group.tolist() == [0, 1, 2, 0, 1, 2]
    assert labels.label.tolist() == [0, 0, 0, 1, 1, 1]


def row_of(seed: int, shares: dict[str, float]) -> dict[str, Any]:
    """A row as `classify` records it, with the same share everywhere for each encoder."""
    kinds: dict[str, dict[str, Any]] = {
        "peclr": {"trained": "pre-training", "variant": "paper"},
        "simclr": {"trained": "pre-training", "variant": "none"},
        "network": {"trained": "fine-tuning"}, "random": {}, "pixels": {}, "constant": {},
    }  # fmt: skip
    encoders = [
        {
            "name": name, **about, "accuracy": {"value": shares[name]},
            "nearest_neighbours": None if name == "constant" else {"value": shares[name]},
            "few": {} if name == "constant" else {"2": [shares[name] - 0.02, shares[name] + 0.02], "9": [shares[name]]},
        }
        for name, about in kinds.items()
    ]  # fmt: skip
    machine = {"cpu": "X", "gpu": "none", "cores": 2, "date": "2026-01-01", "commit": str(seed)}
    return {"machine": machine, "tested": 400, "groups_tested": 40, "groups": 200, "encoders": encoders}


def test_rows_become_a_picture(tmp_path: Path) -> None:
    others = {"network": 0.8, "random": 0.3, "pixels": 0.4, "constant": 0.1}
    rows = [row_of(seed, {"peclr": 0.9 + seed / 100, "simclr": 0.9, **others}) for seed in (0, 1, 2)]
    (tmp_path / "photographs.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (picture,) = draw_photographs(tmp_path, tmp_path)
    assert cv2.imread(picture) is not None


@pytest.mark.slow
def test_make_photographs(tmp_path: Path, record: Record) -> None:
    """`make photographs` in a fresh clone with the environment of this one, from the boxes to the page."""
    copy = ROOT / ".data" / "sign_digits" / "images"
    if not copy.exists():
        pytest.skip(f"{copy} does not exist: make photographs fetches it")
    clone = tmp_path / "clone"
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
    (clone / ".venv").symlink_to(ROOT / ".venv")
    began_s = time.monotonic()
    command = ["make", "photographs", f"PHOTOGRAPHS={copy.resolve().parent}"]
    subprocess.run(command, cwd=clone, check=True)
    minutes = (time.monotonic() - began_s) / 60
    row = json.loads((clone / "runs" / "photographs_digits" / "classification.json").read_text())
    shares = {entry["name"]: entry["accuracy"]["value"] for entry in row["encoders"]}
    right = shares["runs/photographs"]
    record("make_photographs", minutes=round(minutes, 1), tested=row["tested"], right=round(right, 4))
    assert (clone / "runs" / "photographs.html").exists()
    assert right >= 0.92
    assert right > shares["pixels"] > shares["random"] > shares["constant"]
