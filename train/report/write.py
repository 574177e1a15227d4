"""The `report` command: runs, evaluations and predictions on one page that needs nothing but itself."""

from __future__ import annotations

import base64
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import cv2
import numpy as np
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from errors import UserError
from models.hand import REFERENCE_BONE
from train.evaluation_report import CAPTION_PX, HAND_PX
from train.pictures import Image, draw_hand, read_sheet, shown_side_px
from train.pose_pictures import side_view
from train.predict import read_picture
from train.report.charts import SERIES, Chart, Line, keypoint_chart, line_chart
from train.report.contents import Measured, Run, measured, read_json, read_runs

SHOWN: Final = 12
"""Pictures of a kind, at most."""
_PREDICTION_PX: Final = 288
_JPEG_QUALITY: Final = 84


@dataclass(frozen=True)
class Metric:
    """How a metric is shown.

    Attributes:
        title: its name.
        unit: behind the name; empty for a share.
        decimals: of its values.
        higher_is_better: as an area is; an error is not.
        meaning: in words.
    """

    title: str
    unit: str
    decimals: int
    higher_is_better: bool
    meaning: str


METRICS: Final = {
    "pa_epe_cm": Metric("PA-EPE", "cm", 2, False, "mean distance after alignment: the shape of the hand alone"),
    "pa_auc": Metric("PA-AUC", "", 3, True, "area under the PCK curve after alignment, 0 to 5 cm"),
    "pa_epe_px": Metric("PA-EPE", "px", 1, False, "mean distance after alignment, in pixels of the source"),
    "epe_cm": Metric("EPE", "cm", 2, False, "mean distance in the camera's frame: where the hand is, too"),
    "auc": Metric("AUC", "", 3, True, "area under the PCK curve in the camera's frame, 0 to 5 cm"),
    "epe_px": Metric("2D EPE", "px", 1, False, "mean distance in the picture, in pixels of the source"),
}
_PCK: Final = {"aligned_m": ("aligned", "cm", 100.0), "3d_m": ("in the camera's frame", "cm", 100.0), "2d_px": ("in the picture", "px", 1.0)}  # fmt: skip
_PER_KEYPOINT: Final = {"pa_epe_cm": "aligned [cm]", "pa_epe_px": "aligned [px]", "epe_px": "in the picture [px]"}


@dataclass(frozen=True)
class Cell:
    """A figure of the table.

    Attributes:
        value: as it was read.
        text: as it is shown.
        interval: the same of its confidence interval, from and to.
        mark: of a difference: whether it is for the better, for the worse, or the interval contains zero.
    """

    value: float
    text: str
    interval: str
    mark: Literal["", "better", "worse", "open"] = ""


@dataclass(frozen=True)
class Row:
    """A metric of the table, with the cells of all runs and of the difference of the first two."""

    metric: Metric
    cells: Sequence[Cell]
    difference: Cell | None


@dataclass(frozen=True)
class Tile:
    """A picture.

    Attributes:
        uri: its bytes.
        width: in pixels.
        height: likewise.
        alt: for those who cannot see it.
        caption: below it.
    """

    uri: str
    width: int
    height: int
    alt: str
    caption: str = ""


@dataclass(frozen=True)
class Gallery:
    """Pictures of a kind: a title, a line that says what is seen, the pictures, and whether they are wide."""

    title: str
    text: str
    tiles: Sequence[Tile]


@dataclass(frozen=True)
class Curves:
    """Charts with what their colours stand for."""

    title: str
    text: str
    names: Sequence[str]
    charts: Sequence[Chart]


def write_report(
    runs: Sequence[Path], out: Path, *, predictions: Path | None = None, title: str = "From features to 3D hands"
) -> None:
    """Write a page about runs: metrics, curves, views, predictions and the worst hands, all in one file.

    Args:
        runs: folders of pre-training and fine-tuning, in any order; `evaluate` may have been run on the latter.
        out: the page, a .html.
        predictions: a folder that `predict` wrote.
        title: of the page.

    Raises:
        UserError: a folder is not what it should be, or the page cannot be written.
    """
    if out.suffix != ".html":
        raise UserError(f"{out} ends in {out.suffix or 'nothing'}; expected .html")
    read = read_runs(runs)
    found = measured(read)
    content = {
        "title": title,
        "table": None if found is None else _table(found),
        "verdict": None if found is None else _verdict(found),
        "facts": [] if found is None else _facts(found),
        "measured": found,
        "curves": [curves for curves in (*_errors(found), *_pretraining(read), *_finetuning(read)) if curves.charts],
        "galleries": [g for g in (*_views(read), *_predicted(predictions), *_worst(found)) if g.tiles],
        "runs": [(run, _summary(run)) for run in read],
        "rendered": any(_rendered(run.config) for run in read),
        "series": SERIES,
    }
    here = Path(__file__).parent
    environment = Environment(
        loader=FileSystemLoader(here), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    page = environment.get_template("page.html").render(content, style=Markup((here / "page.css").read_text()))  # noqa: S704
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(page)
    except OSError as error:
        raise UserError(f"{out} cannot be written ({error.strerror}): name another with --out") from error


def _number(value: float, metric: Metric, *, signed: bool = False) -> str:
    text = f"{value:{'+' if signed else ''}.{metric.decimals}f}"
    return text.replace("-", "\N{MINUS SIGN}")


def _cell(interval: Mapping[str, float], metric: Metric, *, signed: bool = False) -> Cell:
    low, high = (_number(interval[end], metric, signed=signed) for end in ("low", "high"))
    mark: Literal["", "better", "worse", "open"] = ""
    if signed:
        above, below = interval["low"] > 0, interval["high"] < 0
        mark = "open" if not (above or below) else "better" if above == metric.higher_is_better else "worse"
    return Cell(interval["value"], _number(interval["value"], metric, signed=signed), f"{low} to {high}", mark)


def _table(found: Measured) -> list[Row]:
    rows = []
    for name, metric in METRICS.items():
        intervals = [result["metrics"].get(name) for result in found.results]
        if any(interval is None for interval in intervals):
            continue
        difference = None
        if found.difference is not None and name in found.difference:
            difference = _cell(found.difference[name], metric, signed=True)
        rows.append(Row(metric, [_cell(interval, metric) for interval in intervals], difference))
    return rows


def _verdict(found: Measured) -> str:
    """What the comparison says, in one sentence."""
    if found.difference is None:
        return "No two runs were compared on the same hands: evaluate RUN --compare RUN2 does that."
    name = next(name for name in METRICS if name in found.difference)
    metric, (ours, theirs) = METRICS[name], (f"“{run.name}”" for run in found.runs[:2])
    cell = _cell(found.difference[name], metric, signed=True)
    said = {
        "better": f"{ours} is better than {theirs}",
        "worse": f"{ours} is worse than {theirs}",
        "open": f"{ours} and {theirs} cannot be told apart: the interval contains zero",
    }[cell.mark]
    return f"{said}. {metric.title} differs by {cell.text} {metric.unit} (95 % interval {cell.interval})."


def _facts(found: Measured) -> list[str]:
    """What the figures are of, and what they do not say."""
    first = found.results[0]
    left_out = [f"{count} {reason}" for reason, count in first["left_out"].items() if count]
    facts = [
        f"Measured on {first['images']} images of {first['data']}"
        + (f", left out: {', '.join(left_out)}" if left_out else "")
        + f". Alignment: {first['alignment']}.",
        "Intervals are 95 %, bootstrapped over hands. They do not know the luck of a training run, and there is one "
        "run of each: another seed may say otherwise.",
    ]
    if found.elsewhere:
        names = ", ".join(f"“{run.name}”" for run in found.elsewhere)
        facts.append(f"Measured on other images, and so not shown here: {names}.")
    return facts


def _errors(found: Measured | None) -> list[Curves]:
    if found is None:
        return []
    charts = []
    for name, (where, unit, factor) in _PCK.items():
        if all(name in result["pck"] for result in found.results):
            lines = [
                Line([factor * x for x in result["pck"][name]["thresholds"]], result["pck"][name]["share"], number)
                for number, result in enumerate(found.results)
            ]
            title = f"Keypoints within a distance, {where}"
            charts.append(line_chart(title, lines, x_label=f"distance [{unit}]", percent=True))
    for name, where in _PER_KEYPOINT.items():
        if all(name in result["per_keypoint"] for result in found.results):
            rows = [list(result["per_keypoint"][name].values()) for result in found.results]
            charts.append(keypoint_chart(f"Mean error {where}", rows, range(len(rows))))
    text = "Share of all keypoints whose error is at most as large as the distance (PCK), and where the errors are."
    return [Curves("Where the errors are", text, [run.name for run in found.runs], charts)]


def _pretraining(runs: Sequence[Run]) -> list[Curves]:
    runs = [run for run in runs if run.kind == "pre-training"]
    if not runs:
        return []
    batch = max(run.config["train"]["batch"] for run in runs)
    chance = (math.log(2 * batch - 1), "chance") if all(run.config["train"]["batch"] == batch for run in runs) else None
    charts = [
        line_chart("NT-Xent loss", _lines(runs, "loss"), x_label="step", level=chance),
        line_chart("Mean rank of the other view", _lines(runs, "positive_rank"), x_label="step", log=True),
    ]
    text = (
        f"Of the {2 * batch - 1} other views of a batch, one is of the same image. The loss falls as the network finds "
        "it, and its rank among them all goes to 1."
    )
    return [Curves("Pre-training", text, [run.name for run in runs], charts)]


def _finetuning(runs: Sequence[Run]) -> list[Curves]:
    runs = [run for run in runs if run.kind == "fine-tuning"]
    if not runs:
        return []
    charts = [
        line_chart("2D keypoints, mean error [px of the view]", _lines(runs, "keypoints_px"), x_label="step", log=True),
        line_chart("Depths, mean error [reference bones]", _lines(runs, "depth"), x_label="step", log=True),
    ]
    if any(run.validations for run in runs):
        lines = [
            Line([row["step"] for row in run.validations], [row["pa_epe_cm"] for row in run.validations], number, True)
            for number, run in enumerate(runs)
        ]
        charts.append(line_chart("Held-out hands, PA-EPE [cm]", lines, x_label="step", log=True))
    text = "The losses on augmented training images, and the error on images that no step has seen."
    return [Curves("Fine-tuning", text, [run.name for run in runs], charts)]


def _lines(runs: Sequence[Run], key: str) -> list[Line]:
    return [
        Line([row["step"] for row in run.rows], [row[key] for row in run.rows], number)
        for number, run in enumerate(runs)
    ]


def _views(runs: Sequence[Run]) -> list[Gallery]:
    """What the first run of pre-training has seen, or the first of all."""
    run = next((run for run in runs if run.kind == "pre-training"), runs[0])
    if not run.folder.views_picture.exists():
        return []
    side, views = shown_side_px(run.config["geometry"]["side_px"]), 2 if run.kind == "pre-training" else 1
    pictures = _sheet(run.folder.views_picture, side, views * side)[:SHOWN]
    text = "Two views of each image. The matrices that warped the pixels carried the skeletons."
    if views == 1:
        text = "Views of training images. The matrices that warped the pixels carried the skeletons."
    return [Gallery("What the network saw", text, [_tile(picture, "views of an image") for picture in pictures])]


def _predicted(folder: Path | None) -> list[Gallery]:
    if folder is None:
        return []
    files = sorted(folder.glob("*.json"))
    if not files:
        raise UserError(f"{folder} holds no predictions; expected a folder that predict wrote. Run it first")
    tiles = []
    for file in files[:SHOWN]:
        said = read_json(file)
        try:
            picture = _prediction(said)
        except (KeyError, TypeError, ValueError) as error:
            raise UserError(f"{file} is no prediction ({error}); expected what predict writes. Make it anew") from error
        name = Path(said["image"]).name
        warning = {"likely": ": needs a box"}.get(said["box_needed"], "")
        tiles.append(_tile(picture, f"hand predicted in {name}", f"{name}{warning}"))
    text = "What the network was shown, with the hand that it saw; and that hand from its side, the camera on the left."
    if any("needs a box" in tile.caption for tile in tiles):
        text += (
            " “Needs a box”: shown only the part where it saw a hand, the network sees it elsewhere; predict takes --box."
        )
    return [Gallery("Predictions", text, tiles)]


def _prediction(said: Mapping[str, Any]) -> Image:
    image = read_picture(said["image"])
    x0, y0, x1, y1 = said["box_px"]
    scale = _PREDICTION_PX / max(x1 - x0, y1 - y0, 1e-6)
    shrink = max(1.0, 1 / scale)  # by averaging, so that nothing aliases
    size = [max(1, round(length / shrink)) for length in image.shape[1::-1]]
    small = cv2.resize(image, size, interpolation=cv2.INTER_AREA)
    matrix = np.array([[scale * shrink, 0, -scale * x0], [0, scale * shrink, -scale * y0]])
    side = (_PREDICTION_PX, _PREDICTION_PX)
    view: Image = np.asarray(cv2.warpAffine(small, matrix, side, borderValue=(128, 128, 128)), np.uint8)
    draw_hand(view, (np.array(said["keypoints_px"], np.float64) - [x0, y0]) * scale)
    joints = np.array(said["joints"], np.float64)
    if said["unit"] == "m":
        joints = joints / np.linalg.norm(joints[REFERENCE_BONE[0]] - joints[REFERENCE_BONE[1]])
    return np.concatenate([view, side_view(joints, None, _PREDICTION_PX)], axis=1)


def _worst(found: Measured | None) -> list[Gallery]:
    """Hands that the first run has not seen: some, and those where its errors are largest."""
    galleries = []
    for run in found.runs[:1] if found is not None else []:
        if run.folder.predictions_picture.exists():
            pictures = _sheet(run.folder.predictions_picture, HAND_PX, 3 * HAND_PX)[:SHOWN]
            tiles = [_tile(picture, "label, prediction and both from the side") for picture in pictures]
            text = f"Not chosen, from the validation of “{run.name}”: the label, the prediction, and both from the side "
            galleries.append(Gallery("Held-out hands", text + "with the label in grey.", tiles))
        sheet = run.folder.root / "evaluation" / "worst.png"
        if run.evaluation is not None and sheet.exists():
            pictures = [picture[CAPTION_PX:] for picture in _sheet(sheet, HAND_PX + CAPTION_PX, 3 * HAND_PX)]
            hands = zip(pictures, run.evaluation["worst"], strict=False)
            tiles = [_tile(picture, "label, prediction and both from the side", _errors_of(hand))
                     for picture, hand in list(hands)[:SHOWN]]  # fmt: skip
            text = f"Of all that “{run.name}” was measured on, the hands with the largest errors after alignment."
            galleries.append(Gallery("Its worst hands", text, tiles))
    return galleries


def _errors_of(hand: Mapping[str, Any]) -> str:
    shown = [(METRICS[name], hand.get(name)) for name in ("pa_epe_cm", "epe_cm", "epe_px")]
    words = [f"{metric.title} {_number(value, metric)} {metric.unit}" for metric, value in shown if value is not None]
    return " · ".join([Path(hand["file"]).name, *words[:2]])


def _sheet(path: Path, height: int, width: int) -> list[Image]:
    try:
        return read_sheet(path, height=height, width=width)
    except OSError as error:
        raise UserError(f"{error}; expected the pictures that a run or evaluate wrote. Make it anew") from error


def _tile(picture: Image, alt: str, caption: str = "") -> Tile:
    encoded = cv2.imencode(".jpg", picture[..., ::-1], [cv2.IMWRITE_JPEG_QUALITY, _JPEG_QUALITY])[1]
    uri = f"data:image/jpeg;base64,{base64.b64encode(encoded.tobytes()).decode()}"
    return Tile(uri, picture.shape[1], picture.shape[0], alt, caption)


def _summary(run: Run) -> dict[str, str]:
    """What a run was, in a few words each."""
    config, rows = run.config, run.rows
    median: Callable[[str], float] = lambda key: float(np.median([row[key] for row in rows]))  # noqa: E731
    last = rows[-1]
    of = f"{config['encoder']['name']} from {config['encoder']['weights']}"
    summary = {
        "encoder": of,
        "steps": f"{last['step']} of {config['train']['batch']} images, {last['epoch']:.3g} epochs",
        "speed": f"{median('images_per_s'):.0f} images/s, {median('wait_share'):.1%} of the time waiting for data",
        "loss": f"{rows[0]['loss']:.3f} to {last['loss']:.3f}",
    }
    tables = config["data"] if isinstance(config["data"], list) else [config["data"]]
    data = [f"{table['root']}, {table['split']}" for table in tables]
    if run.kind == "fine-tuning":
        data = [f"{words}, {table['label_fraction']:.0%} of the labels" for words, table in zip(data, tables, strict=True)]
    return {"data": "; ".join(data), **summary}


def _rendered(config: Mapping[str, Any]) -> bool:
    """Whether a run saw the hands of `make-data`."""
    tables = config["data"] if isinstance(config["data"], list) else [config["data"]]
    return any(table["source"] == "freihand" and (Path(table["root"]) / "dataset.json").exists() for table in tables)
