"""The part of a report about the results of `classify`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, Final, NamedTuple

import cv2
import numpy as np

from errors import UserError
from train.report.charts import Line, line_chart
from train.report.contents import read_json
from train.report.curves import Curves
from train.report.galleries import Gallery, tile

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
    image = cv2.imread(str(picture))
    if image is None:
        raise UserError(f"{picture} cannot be read; expected the picture that classify writes. Run classify again")
    try:
        return _shown(found, tile(np.asarray(image[..., ::-1], np.uint8), "images and their nearest neighbours"))
    except (LookupError, TypeError, ValueError, AttributeError, StopIteration) as error:
        raise UserError(
            f"{file} was not written by this version of classify ({error!r}). Run classify again"
        ) from error


def _shown(found: Mapping[str, Any], picture: Any) -> Classification:
    entries = found["encoders"]
    first = next(entry for entry in entries if "confusion" in entry)
    counts = np.array(first["confusion"], np.int64)
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    few = [int(count) for count in first["few"]]
    accuracy = {entry["name"]: _share(entry["accuracy"]) for entry in entries}
    others = ", ".join(
        f"{accuracy[name].text} from {what}"
        for name, what in (("pixels", "the pixels"), ("random", "the same network with random weights"))
    )
    measured = accuracy[first["name"]]
    interval = f" (95\N{NO-BREAK SPACE}% interval {measured.interval})" if measured.interval else ""
    verdict = (
        f"On frozen features of “{first['name']}”, a linear classifier tells {len(found['classes'])} classes apart: it "
        f"is right on {measured.text} of {found['tested']} samples{interval}, all of groups that it was not fitted to. "
        f"For comparison: {others}, {accuracy['constant'].text} for always the same class."
    )
    if few:
        alone = [fmean(entry["few"][str(few[0])]) for entry in entries if entry["name"] in (first["name"], "pixels")]
        verdict += f" With the labels of only {few[0]} groups: {alone[0]:.1%}, and {alone[1]:.1%} from the pixels."
    return Classification(
        verdict,
        ["logistic regression", f"{found['neighbours']} nearest neighbours",
         *(f"labels of {count} groups" for count in few)],
        [
            Judged(entry["name"], _what(entry), [
                _share(entry["accuracy"]), _share(entry["nearest_neighbours"]),
                *(Share(f"{fmean(entry['few'][str(count)]):.1%}") if entry["few"] else None for count in few),
            ])
            for entry in entries
        ],
        [_how(found), *_seen(entries)],
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


def _what(entry: Mapping[str, Any]) -> str:
    """What an encoder is, in a few words."""
    kind = entry.get("trained")
    if kind is None:
        return _BASELINES[entry["name"]]
    method = {"pre-training": {"none": "pre-trained by SimCLR"}.get(entry.get("variant", ""), "pre-trained by PeCLR")}
    how = method.get(kind, "fine-tuned with labels")
    return f"{entry['encoder']}, {how}, {entry['steps']:,} steps of {entry['batch']} images"


def _how(found: Mapping[str, Any]) -> str:
    return (
        f"{found['tested']} of {found['samples']} samples are tested, of {found['groups_tested']} of {found['groups']} "
        "groups. The classifier is fitted to samples of other groups. Intervals are 95 %, bootstrapped over groups, "
        "and do not include the variation between training runs. With few labels: the mean of several draws of groups."
    )


def _seen(entries: Sequence[Mapping[str, Any]]) -> list[str]:
    """A line about encoders that were trained on tested images."""
    seen = {entry["name"]: entry["trained_on_tested"] for entry in entries if entry["trained_on_tested"] != 0}
    told = [f"“{name}” on {'an unknown number' if count is None else count}" for name, count in seen.items()]
    return [f"Trained on tested files: {', '.join(told)}. Copies elsewhere are not recognised."] if told else []


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
