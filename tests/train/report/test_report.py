"""The report: one page that needs nothing else, whose figures are those of the files that it tells of."""

import base64
import json
import re
import shutil
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import numpy.typing as npt
import pytest
import torch

from peclr_dali.errors import UserError
from peclr_dali.models.encoders import Encoder, build_encoder
from peclr_dali.pipelines.samples.index import Index
from peclr_dali.pipelines.sources import load_index
from peclr_dali.train.config.finetuning import FinetuneConfig
from peclr_dali.train.config.load import load_config
from peclr_dali.train.config.pretraining import Config
from peclr_dali.train.evaluation.evaluate import evaluate
from peclr_dali.train.finetune import finetune
from peclr_dali.train.pose.metrics import METRICS
from peclr_dali.train.pose.predict import predict
from peclr_dali.train.pose.predictions import FILE
from peclr_dali.train.pretrain import pretrain
from peclr_dali.train.report.charts import charts
from peclr_dali.train.report.contents import Measured, as_text, in_words, of_pretraining, read_runs, table
from peclr_dali.train.report.galleries import COUNT, GAP_PX, QUERIES, SAMPLE, SIDE_PX, neighbours, predictions
from peclr_dali.train.report.write import write_report
from peclr_dali.train.runs.checkpoint import find_checkpoint, load_checkpoint
from peclr_dali.train.runs.pictures import read_sheet, save_sheet
from tests.train import tiny_hands, tiny_run

Array = npt.NDArray[Any]

pytestmark = pytest.mark.usefixtures("narrow")
NEIGHBOURS = "Nearest neighbours, before and after pre-training"
VOID = {"meta", "link", "img", "br", "hr", "input"}


class Page(HTMLParser):
    """Elements of a page with their attributes and text; complains where tags do not close each other."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.words: dict[str, list[str]] = {}
        self.feed(text)
        self.close()
        assert not self.open, f"never closed: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and data.strip():
            self.words.setdefault(self.open[-1], []).append(data.strip())

    def attributes(self, name: str) -> list[str]:
        return [value for _, attributes in self.elements for key, value in attributes.items() if key == name and value]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of pre-training, two of fine-tuning, an evaluation that compares them, and predictions."""
    root = tmp_path_factory.mktemp("report")
    hands = tiny_hands.write_hands(root / "hands", 20)
    threads = torch.get_num_threads()
    pretrain(load_config(Config, [], tiny_run.settings(hands, root / "pre", "data.source=freihand", "train.epochs=1")))
    for name, weights in (("tuned", str(root / "pre")), ("scratch", "random")):
        overrides = tiny_hands.settings(hands, root / name, "train.epochs=1", f"encoder.weights={weights}")
        finetune(load_config(FinetuneConfig, [], overrides))
    evaluate(
        [root / "tuned"], [], [], out=None, compare=[root / "scratch"], crop="boxes", worst=4, submission=False,
        proper_rotation=False,
    )  # fmt: skip
    predict(root / "tuned", [str(hands / "training" / "rgb" / f"0000000{n}.jpg") for n in range(3)], root / "predicted")
    torch.set_num_threads(threads)
    write_report([root / "pre", root / "tuned", root / "scratch"], root / "report.html", predictions=root / "predicted")
    return root


def test_the_page_has_every_section_and_needs_no_external_file(folder: Path) -> None:
    text = (folder / "report.html").read_text()
    page = Page(text)
    assert set(re.findall(r"data:image/jpeg;base64,(.{4})", text)) == {"/9j/"}  # the first bytes of a JPEG
    without_pictures, count = re.subn(r"data:image/(jpeg|png);base64,[\w+/=]+", "", text)
    assert count == len(page.attributes("src"))
    assert not re.search(r"https?:|//[\w.]+/|url\((?!#)|@import", without_pictures)
    assert not page.attributes("href")
    assert "nan" not in " ".join(word for words in page.words.values() for word in words).lower().split()
    assert page.words["h2"] == [
        "Metrics", "Where the errors are", "Pre-training", "Fine-tuning", "What the network saw", "Predictions",
        "Held-out images", "Largest errors", NEIGHBOURS, "The runs",
    ]  # fmt: skip
    sources = page.attributes("src")
    assert sum(source.startswith("data:image/png") for source in sources) == 7  # charts
    # views, predictions, held-out hands, worst hands, neighbours
    assert len(sources) == 7 + 12 + 3 + 8 + 4 + QUERIES
    assert sum(words.startswith("Colours:") for words in page.words["p"]) == 4
    pre, tuned = (run.rows[-1]["step"] for run in read_runs([folder / "pre", folder / "tuned"]))
    assert page.words["h1"] == [
        f"Pre-training of resnet18 on hands, {pre} steps; fine-tuning of resnet18 on hands, {tuned} steps"
    ]
    short = [words for words in page.words["p"] if "too short to judge" in words]
    assert [words[: words.index(":")] for words in short] == [
        f"“{name}” has taken {steps} steps"
        for name, steps in (("pre", pre), ("scratch", tuned))  # not of "tuned", which starts from "pre"
    ]
    assert any("the loss does not use keypoints" in words for words in page.words["p"])


@pytest.mark.parametrize(("error_cm", "words"), [(1.5, "tuned: no better than"), (1.4, "")])
def test_a_chart_says_which_run_is_no_better_than_a_rigid_hand(error_cm: float, words: str, folder: Path) -> None:
    (run,) = read_runs([folder / "tuned"])
    rows = [{**run.rows[-1], "pa_epe_cm": error, "constant_pa_epe_cm": 1.5} for error in (9.0, error_cm)]
    *_, section = charts([replace(run, validations=rows)], None)
    captions = [picture.caption for picture in section.pictures]
    assert captions[-1].startswith(words)
    assert [bool(caption) for caption in captions] == [*[False] * (len(captions) - 1), bool(words)]


def test_neighbours_are_those_of_the_start_and_of_the_checkpoint(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A view is as grey as its place; the first encoder finds places in order, the second one in reverse."""
    encoders = []

    def features(encoder: Encoder, index: Index, rows: Array, *_: object) -> tuple[Array, Array, Array]:
        encoders.append(encoder)
        count = len(rows)
        angle = np.arange(count) / count * (1 if len(encoders) == 1 else -1) % 1
        angle[0] = 0
        views = np.tile(np.arange(count, dtype=np.uint8)[:, None, None, None], (1, 8, 8, 3))
        places = np.delete(np.arange(count), 1)  # 1 cannot be read
        return places, np.stack([np.cos(angle), np.sin(angle)], axis=1)[places], views[places]

    monkeypatch.setattr("peclr_dali.train.report.galleries.features_of_rows", features)
    (run,) = read_runs([folder / "pre"])
    gallery = neighbours(run)
    saved = load_checkpoint(find_checkpoint(folder / "pre", ""))
    torch.manual_seed(run.config.run.seed)
    start = build_encoder(run.config.encoder, run.config.geometry.side_px).state_dict()
    trained = {name.removeprefix("encoder."): tensor for name, tensor in saved["network"].items()}
    for encoder, expected in zip(encoders, (start, trained), strict=True):
        assert all(torch.equal(tensor, expected[name]) for name, tensor in encoder.state_dict().items())
    encoded = base64.b64decode(gallery.pictures[0].uri.partition(",")[2])
    picture = np.asarray(cv2.imdecode(np.frombuffer(encoded, np.uint8), 0))
    index = load_index(run.config.data)
    group = index.groups[np.random.default_rng(0).permutation(len(index))[:SAMPLE]]
    others = [place for place in range(2, len(group)) if group[place] != group[0]]
    left = picture.shape[0] + GAP_PX + SIDE_PX // 2 + np.arange(COUNT) * (SIDE_PX + GAP_PX)
    for line, expected_places in enumerate((others[:COUNT], others[: -COUNT - 1 : -1])):
        shown = picture[SIDE_PX // 2 + line * (SIDE_PX + GAP_PX), left]
        np.testing.assert_allclose(shown.astype(int), expected_places, atol=1)


def test_predictions_alone_make_a_page(folder: Path, tmp_path: Path) -> None:
    write_report([], tmp_path / "page.html", predictions=folder / "predicted")
    page = Page((tmp_path / "page.html").read_text())
    assert (page.words["h1"], page.words["h2"]) == ([f"Predictions in {folder / 'predicted'}"], ["Predictions"])
    stopped = shutil.copytree(folder / "predicted", tmp_path / "stopped")
    results = json.loads((stopped / FILE).read_text())
    assert not any("Stopped early" in words for words in page.words["p"])
    (stopped / FILE).write_text(json.dumps(results | {"complete": False, "hands": 7}))
    assert predictions(stopped).text.endswith("Stopped early: predict had done 3 of 7 hands.")
    for spread_px, side_px, prediction in zip((6, 7, 5), (100, 100, 50), results["predictions"], strict=True):
        prediction.update(spread_px=spread_px, image=f"{spread_px}.jpg", box_px=[0, 0, side_px, 100])
    (stopped / FILE).write_text(json.dumps(results))
    assert [picture.caption for picture in predictions(stopped).pictures] == [
        "5.jpg, spread 5.0 px",
        "7.jpg, spread 7.0 px",
        "6.jpg, spread 6.0 px",
    ]  # by the share of the box
    for given, message in ((None, "nothing to show"), (folder / "tuned", "holds no predictions")):
        with pytest.raises(UserError, match=message):
            write_report([], tmp_path / "page.html", predictions=given)
    with pytest.raises(UserError, match="is not a run's folder"):
        write_report([folder / "predicted"], tmp_path / "page.html")


def test_without_checkpoint_or_images_no_neighbours_are_shown(folder: Path, tmp_path: Path) -> None:
    without = copied(folder / "pre", tmp_path / "checkpoints")
    moved = shutil.copytree(folder / "pre", tmp_path / "images")
    config = moved / "config.toml"
    config.write_text(config.read_text().replace(str(folder / "hands"), str(tmp_path / "none")))
    for run, words in ((without, "holds no checkpoint"), (moved, "No such file or directory")):
        gallery = neighbours(read_runs([run])[0])
        assert gallery.text.startswith("Not shown: ")
        assert words in gallery.text
        assert not gallery.pictures


def copied(run: Path, folder: Path) -> Path:
    return shutil.copytree(run, folder / run.name, ignore=shutil.ignore_patterns("*.pt"))


def test_figures_equal_those_in_the_files(folder: Path) -> None:
    page = Page((folder / "report.html").read_text())
    content = json.loads((folder / "tuned" / "evaluation" / "metrics.json").read_text())
    comparison = content["comparison"]
    expected = []
    for name, metric in METRICS.items():
        if name in content["metrics"]:
            columns = (content["metrics"], comparison["other"]["metrics"], comparison["difference"])
            for number, column in enumerate(columns):
                expected.append((column[name]["value"], as_text(column[name]["value"], metric, signed=number == 2)))
    values = [float(attributes["value"] or "nan") for tag, attributes in page.elements if tag == "data"]
    assert list(zip(values, page.words["data"], strict=True)) == expected


def with_errors(
    folder: Path,
    *runs: str,
    constants: Any = None,
    lost: tuple[list[str], list[str]] = ([], []),
    **ends: tuple[float, float | None, float | None],
) -> Measured:
    """An evaluation with these values and intervals, or a difference with these if there are two runs.

    `lost` are the metrics in which the runs are no better than a constant, and those in which both are.
    """
    figures = {name: dict(zip(("value", "low", "high"), three, strict=True)) for name, three in ends.items()}
    shared = {"metrics": figures, "constants": constants or {}, "lost_to_constants": lost[0]}
    results: list[dict[str, Any]] = [{**shared, "checkpoints": [run]} for run in runs]
    comparison = {"difference": figures, "lost": lost[1], "notes": ["A note."]} if len(runs) > 1 else {}
    return Measured(read_runs([folder / run for run in runs]), results, comparison)


def test_the_verdict_follows_the_numbers(folder: Path) -> None:
    better = with_errors(
        folder, "tuned", "scratch", pa_epe_cm=(-0.2, -0.3, -0.1), epe_px=(1, 0.5, 2), auc=(0.1, 0.05, 0.2)
    )
    assert in_words(better) == [
        "By PA-EPE, “tuned” is better than “scratch”: \N{MINUS SIGN}0.20 cm (95 % interval "
        "\N{MINUS SIGN}0.30 to \N{MINUS SIGN}0.10).",
        "By 2D EPE, “tuned” is worse than “scratch”: +1.0 px (95 % interval +0.5 to +2.0).",
        "A note.",
    ]
    marks = {metric.title: cells[-1].mark for metric, cells, _ in table(better)}
    assert (marks["PA-EPE"], marks["AUC"], marks["2D EPE"]) == ("better", "better", "worse")
    better = with_errors(  # both lose to a constant in 2D, which is no headline then
        folder, "tuned", "scratch", lost=(["epe_px"], ["epe_px"]), pa_epe_cm=(0, -1, 1), epe_px=(-9, -10, -8)
    )
    assert [sentence.split(",")[0] for sentence in in_words(better)] == ["By PA-EPE", "A note."]
    better.results[0]["checkpoints"].extend(["another", "a third"])
    assert in_words(better)[0].startswith("By PA-EPE, “tuned” and 2 more cannot be told apart from “scratch”")
    for ends in ((-0.2, -0.5, 0.1), (-0.2, None, None)):
        assert "cannot be told apart" in in_words(with_errors(folder, "tuned", "scratch", epe_px=ends))[0]


def test_one_run_is_summed_up_by_its_errors_and_by_the_constants_that_beat_it(folder: Path) -> None:
    constants = {"rigid_pose": {"pa_epe_cm": 1.5}, "mean_joints": {"epe_cm": 9.0}}
    errors: dict[str, Any] = {"pa_epe_cm": (1.5, 1.4, 1.6), "epe_px": (12.34, None, None), "constants": constants}
    assert in_words(with_errors(folder, "tuned", lost=(["pa_epe_cm"], []), **errors)) == [
        "“tuned” has a PA-EPE of 1.50 cm (95 % interval 1.40 to 1.60).",
        "“tuned” has a 2D EPE of 12.3 px (no interval: too few or too unequal groups, or one pre-training).",
        "By PA-EPE, “tuned” is no better than one rigid pose 1.50 cm, which does not look at the picture.",
    ]
    assert len(in_words(with_errors(folder, "tuned", **errors))) == 2


def test_a_run_alone_and_a_run_that_was_never_measured(folder: Path) -> None:
    out = folder / "alone.html"
    write_report([folder / "pre"], out)
    page = Page(out.read_text())
    assert page.words["h2"] == ["Pre-training", "What the network saw", NEIGHBOURS, "The runs"]
    (run,) = read_runs([folder / "pre"])
    assert (
        page.words["p"][0] == f"“pre”: loss {run.rows[0]['loss']:.2f} at first, {run.rows[-1]['loss']:.2f} at the end."
    )
    probes = [{"step": step, "epe_px_of_224": 50.0 / step, "constant_epe_px_of_224": 40.0} for step in (1, 2)]
    assert of_pretraining([replace(run, validations=probes)])[0].endswith(
        "frozen features, step 1: 2D EPE 50.00 px of 224 (a constant: 40.00) and step 2: 2D EPE 25.00 px of 224 (a "
        "constant: 40.00)."
    )
    write_report([folder / "scratch"], out)
    assert Page(out.read_text()).words["h2"] == ["Fine-tuning", "What the network saw", "Held-out images", "The runs"]
    write_report([folder / "tuned"], out)  # its comparison is with a run that is not asked for
    page = Page(out.read_text())
    assert "difference" not in page.words["th"]
    assert any("“tuned” has a PA-EPE of" in words for words in page.words["p"])


def test_names_from_files_cannot_become_markup(folder: Path, tmp_path: Path) -> None:
    """Nor mathematics in a legend."""
    shutil.copytree(folder / "tuned", tmp_path / "_a$x^$<b>&c")
    text = re.sub('root = "/.*"', 'root = "http://me:secret@c.org/d"', (folder / "tuned" / "config.toml").read_text())
    (tmp_path / "_a$x^$<b>&c" / "config.toml").write_text(text)
    write_report(
        [tmp_path / "_a$x^$<b>&c", folder / "scratch"], tmp_path / "page.html", title="<script>alert(1)</script>"
    )
    page = Page((tmp_path / "page.html").read_text())
    assert "script" not in {tag for tag, _ in page.elements}
    assert page.words["h1"] == ["<script>alert(1)</script>"]
    assert re.search('root = "http://.{3}@c.org/d"', page.words["pre"][0])


@pytest.mark.parametrize(
    ("file", "words"),
    [
        ("metrics.jsonl", "has no rows"),
        ("evaluation/metrics.json", "metrics.json: expected what 'evaluate' writes"),
        ("evaluation/worst.png", "holds no pictures of 576 x 212"),
    ],
)
def test_a_cut_file_of_a_run_is_one_line(file: str, words: str, folder: Path, tmp_path: Path) -> None:
    (copied(folder / "tuned", tmp_path) / file).write_bytes(b"{" if file.endswith("n") else b"")
    with pytest.raises(UserError, match=words):
        write_report([tmp_path / "tuned"], tmp_path / "report.html")
    assert not (tmp_path / "report.html").exists()


@pytest.mark.parametrize(("count", "columns"), [(7, 3), (2, 6), (1, 1)])
def test_a_sheet_is_read_as_it_was_written(count: int, columns: int, tmp_path: Path) -> None:
    pictures = list(np.random.default_rng(0).integers(0, 255, (count, 20, 30, 3), np.uint8))
    save_sheet(tmp_path / "sheet.png", pictures, columns=columns)
    np.testing.assert_array_equal(np.stack(read_sheet(tmp_path / "sheet.png", height=20, width=30)), np.stack(pictures))
    with pytest.raises(UserError, match="holds no pictures of 31 x 20"):
        read_sheet(tmp_path / "sheet.png", height=20, width=31)
