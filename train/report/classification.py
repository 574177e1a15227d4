"""The part of a report about the results of `classify`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, Final, NamedTuple

import numpy as np

from peclr_dali.errors import UserError
from peclr_dali.train.report.charts import Line, line_chart
from peclr_dali.train.report.contents import read_json
from peclr_dali.train.report.curves import Curves
from peclr_dali.train.report.galleries import Gallery, Tile, tile
from peclr_dali.train.runs.pictures import read_picture

_BASELINES: Final = {
    "constant": "always the most frequent class",
    "random": "the first encoder's network with random weights",
    "pixels": "no encoder: the pixels of the views",
    "imagenet": "the first encoder's network, trained on ImageNet with labels",
}


class Share(NamedTuple):
    """A share in percent as text, and its interval if there is one."""

    text: str
    interval: str | None = None


class Judged(NamedTuple):
    """An encoder: its name, what it is, and its shares under the headings of the table."""

    name: str
    what: str
    shares: Sequence[Share | None]


class Classification(NamedTuple):
    """Results of `classify`, ready to be shown.

    Attributes:
        verdict: the result in a sentence.
        heads: headings of the columns of `rows`.
        notes: how it was measured.
        curves: accuracy over the number of groups with labels, if it was measured.
        confusion: (C, C), true class and class that the first encoder's logistic regression says: count, and share of
            the true class.
        neighbours: the picture of nearest neighbours.
    """

    verdict: str
    heads: Sequence[str]
    rows: Sequence[Judged]
    notes: Sequence[str]
    curves: Curves | None
    classes: Sequence[str]
    confusion: Sequence[Sequence[tuple[int, float]]]
    neighbours: Gallery


def read_classification(folder: Path) -> Classification:
    """Read a folder that `classify` wrote. Missing or damaged files are a `UserError`."""
    file, picture = folder / "classification.json", folder / "neighbours.png"
    found = read_json(file)
    image = read_picture(picture)
    if image is None:
        raise UserError(f"{picture} cannot be read; expected the picture that classify writes. Run classify again")
    try:
        return _shown(found, tile(image, "images and their nearest neighbours"))
    except (LookupError, TypeError, ValueError, AttributeError, StopIteration) as error:
        raise UserError(
            f"{file} was not written by this version of classify ({error!r}). Run classify again"
        ) from error


def _shown(found: Mapping[str, Any], picture: Tile) -> Classification:
    entries = found["encoders"]
    first = next(entry for entry in entries if "confusion" in entry)
    counts = np.array(first["confusion"], np.int64)
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    few = [int(count) for count in first["few"]]
    return Classification(
        _verdict(found, first, few),
        ["logistic regression", f"{found['neighbours']} nearest neighbours",
         *(f"labels of {count} groups" for count in few)],
        [
            Judged(entry["name"], _what(entry), [
                _share(entry["accuracy"]), _share(entry["nearest_neighbours"]),
                *(Share(f"{fmean(entry['few'][str(count)]):.1%}") if entry["few"] else None for count in few),
            ])
            for entry in entries
        ],
        _notes(found),
        _curves(entries, few) if few else None,
        found["classes"],
        [list(zip(row, part, strict=True)) for row, part in zip(counts.tolist(), shares.tolist(), strict=True)],
        Gallery(
            "Nearest neighbours",
            "Left: a tested image of each class. Middle: its nearest images of other groups, by the network with "
            "random weights. Right: by the trained one. Green frames: the same class. Distance: the angle of features.",
            [picture],
            wide=True,
        ),
    )  # fmt: skip


def _verdict(found: Mapping[str, Any], first: Mapping[str, Any], few: Sequence[int]) -> str:
    entries = {entry["name"]: entry for entry in found["encoders"]}
    accuracy = {name: _share(entry["accuracy"]) for name, entry in entries.items()}
    measured = accuracy[first["name"]]
    interval = f" (95\N{NO-BREAK SPACE}% interval {measured.interval})" if measured.interval else ""
    words = (
        f"On frozen features of “{first['name']}”, a linear classifier tells {len(found['classes'])} classes apart: it "
        f"is right on {measured.text} of {found['tested']} samples{interval}, all of groups that it was not fitted to. "
        f"For comparison: {accuracy['pixels'].text} from the pixels, {accuracy['random'].text} from the same network "
        f"with random weights, {accuracy['constant'].text} for always the same class."
    )
    if few:
        trained, pixels = (fmean(entry["few"][str(few[0])]) for entry in (first, entries["pixels"]))
        words += f" With the labels of only {few[0]} groups: {trained:.1%}, and {pixels:.1%} from the pixels."
    return words


def _what(entry: Mapping[str, Any]) -> str:
    """What an encoder is, in a few words."""
    kind = entry.get("trained")
    if kind is None:
        return _BASELINES[entry["name"]]
    method = "SimCLR" if entry.get("variant") == "none" else "PeCLR"
    how = f"pre-trained by {method}" if kind == "pre-training" else "fine-tuned with labels"
    return f"{entry['encoder']}, {how}, {entry['steps']:,} steps of {entry['batch']} images"


def _notes(found: Mapping[str, Any]) -> list[str]:
    """How it was measured, and which encoders were trained on tested images."""
    notes = [
        f"{found['tested']} of {found['samples']} samples are tested, of {found['groups_tested']} of {found['groups']} "
        "groups. The classifier is fitted to samples of other groups. Intervals are 95 %, bootstrapped over groups, "
        "and do not include the variation between training runs. With few labels: the mean of several draws of groups."
    ]
    seen = {entry["name"]: entry["trained_on_tested"] for entry in found["encoders"]}
    words = [f"“{name}” on {'an unknown number' if n is None else n}" for name, n in seen.items() if n != 0]
    if words:
        notes.append(f"Trained on tested files: {', '.join(words)}. Copies elsewhere are not recognised.")
    return notes


def _share(interval: Mapping[str, float | None] | None) -> Any:
    if interval is None:
        return None
    low, high = interval["low"], interval["high"]
    return Share(f"{interval['value']:.1%}", None if low is None or high is None else f"{low:.1%} to {high:.1%}")


def _curves(entries: Sequence[Mapping[str, Any]], few: Sequence[int]) -> Curves:
    judged = [entry for entry in entries if entry["few"]]
    lines = [
        Line(few, [fmean(entry["few"][str(count)]) for count in few], number, dots=True)
        for number, entry in enumerate(judged)
    ]
    return Curves(
        "With few labels",
        "The accuracy where only so many groups have labels.",
        [entry["name"] for entry in judged],
        [line_chart("Accuracy", lines, x_label="groups with labels", percent=True)],
    )
