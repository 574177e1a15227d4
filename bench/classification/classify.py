"""The `classify` command: how well classes of images can be read from frozen features.

Logistic regression and nearest neighbours on frozen features are how encoders of self-supervised learning are judged
(Chen et al., "A Simple Framework for Contrastive Learning of Visual Representations", 2020, appendix B.8; Wu et al.,
"Unsupervised Feature Learning via Non-Parametric Instance Discrimination", 2018, section 3.4). Both are scikit-learn's.
"""

from __future__ import annotations

import csv
import io
import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from sklearn.dummy import DummyClassifier
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import confusion_matrix
from sklearn.neighbors import KNeighborsClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from threadpoolctl import threadpool_limits

from peclr_dali.bench.classification.encoders import Frozen, features_of, images_that_trained, load_frozen
from peclr_dali.bench.classification.labels import Labels, Rows, Splits, read_labels, splits
from peclr_dali.bench.classification.neighbours import save_neighbours
from peclr_dali.bench.rows import describe_machine
from peclr_dali.errors import UserError
from peclr_dali.parsing import require_results_of
from peclr_dali.pipelines.config import DataConfig, refuse_among_images
from peclr_dali.pipelines.samples.index import Index
from peclr_dali.pipelines.sources import load_index
from peclr_dali.train.pose.inference import Progress
from peclr_dali.train.pose.metrics import confidence_intervals
from peclr_dali.train.probe.features import Floats
from peclr_dali.writing import write_text

RESULTS: Final = ("classification.json", "predictions.csv", "neighbours.png")
"""The files that `classify` writes."""
_BENCH: Final = "classification"
NEIGHBOURS: Final = 20
INVERSE_PENALTY: Final = 0.1
"""C of the L2 penalty, for all encoders; features are standardised."""
DRAWS: Final = 10
"""Draws of the few groups with labels."""

log = logging.getLogger(__name__)


def classify(
    sources: Sequence[str],
    images: Path,
    out: Path,
    progress: Progress,
    *,
    box: str = "center",
    table: Path | None = None,
    groups: str | None = None,
    folds: int = 5,
    few: Sequence[int] = (),
) -> dict[str, Any]:
    """Judge frozen encoders by classes of images. Writes classification.json, predictions.csv and neighbours.png.

    Args:
        sources: runs, and perhaps "imagenet"; `load_frozen` adds the baselines.
        images: folder of images, with a folder for each class unless there is a `table`.
        box: file of boxes, or "center" for whole images.
        table, groups: see `read_labels`.
        folds: number of folds, where the table has no parts.
        few: numbers of groups. The logistic regression is also fitted to only so many groups of the first split,
            drawn `DRAWS` times.

    Returns:
        The content of classification.json, a row for bench/results/.

    Raises:
        UserError: an input cannot be used.
    """
    data = DataConfig("folder", str(images), box=box, box_margin=1.0)
    refuse_among_images(out, data)
    require_results_of("classify", out, RESULTS, lambda found: found["bench"] == _BENCH)
    everything = load_index(data)
    index, labels = read_labels(everything, table, groups)
    first_cut = splits(labels, folds)[0]
    for count in few:  # refuses before the long work
        draw_groups(count, labels, first_cut)
    encoders = load_frozen(sources)
    features: dict[str, Floats] = {}
    for encoder in encoders:
        readable, features[encoder.name], views = features_of(encoder, index, progress)
    if not readable.all():
        log.warning("%d of %d images cannot be read and are left out", (~readable).sum(), len(index))
        index, labels, views = index.select(np.flatnonzero(readable)), labels.only(readable), views[readable]
        features = {name: known[readable] for name, known in features.items()}
    cuts = splits(labels, folds)
    tested = np.concatenate([rows for _, rows in cuts])
    draws = {str(count): draw_groups(count, labels, cuts[0]) for count in few}
    constant = accuracies(
        {"accuracy": predict("constant", np.zeros((len(index), 1), np.float32), labels, cuts)}, labels, tested
    )
    entries = [{"name": "constant", **constant, "nearest_neighbours": None, "few": {}, "trained_on_tested": 0}]
    predictions = {}
    for encoder in encoders:
        known = features[encoder.name]
        by = {"accuracy": "linear", "nearest_neighbours": "nearest"}
        predicted = {name: predict(model, known, labels, cuts) for name, model in by.items()}
        predictions[encoder.name] = linear = predicted["accuracy"]
        entries.append({
            **encoder.about(),
            **accuracies(predicted, labels, tested),
            "few": {count: [_share_right(known, labels, cut) for cut in of_count] for count, of_count in draws.items()},
            "trained_on_tested": _seen(encoder, index, images, tested),
            "confusion": confusion_matrix(
                labels.label[tested], linear[tested], labels=range(len(labels.classes))
            ).tolist(),
        })  # fmt: skip
    row = {
        "bench": _BENCH,
        "machine": describe_machine(),
        "data": str(images),
        "classes": list(labels.classes),
        "split": "parts" if labels.test is not None else f"{folds} folds",
        "labels": None if table is None else str(table),
        "group_by": groups,
        "box": box,
        "samples": len(index),
        "tested": len(tested),
        "groups": len(np.unique(labels.group)),
        "groups_tested": len(np.unique(labels.group[tested])),
        "confidence": 0.95,
        "neighbours": NEIGHBOURS,
        "inverse_penalty": INVERSE_PENALTY,
        "encoders": entries,
    }
    out.mkdir(parents=True, exist_ok=True)
    write_text(out / RESULTS[0], json.dumps(row, indent=2) + "\n")  # first, since it makes the folder ours
    _save_predictions(out / RESULTS[1], index, labels, tested, predictions)
    before_and_after = features["random"], features[encoders[0].name]
    save_neighbours(out / RESULTS[2], views, before_and_after, labels, *cuts[0])
    return row


def predict(model: str, features: Floats, labels: Labels, cuts: Splits) -> Rows:
    """The classes (N,) of the tested samples by a model that is fitted on the other side of each split; -1 elsewhere.

    Args:
        model: "linear" (logistic regression), "nearest" (neighbours) or "constant" (the most frequent class).
        features: (N, D).
    """
    predicted = np.full(len(features), -1)
    for fitted, tested in cuts:
        models = {
            "linear": make_pipeline(StandardScaler(), LogisticRegression(C=INVERSE_PENALTY, max_iter=2000)),
            "nearest": KNeighborsClassifier(min(NEIGHBOURS, len(fitted)), weights="distance", metric="cosine"),
            "constant": DummyClassifier(strategy="most_frequent"),
        }
        with threadpool_limits(1):  # the matrices are small: threads would wait for each other
            predicted[tested] = models[model].fit(features[fitted], labels.label[fitted]).predict(features[tested])
    return predicted


def _share_right(features: Floats, labels: Labels, cut: tuple[Rows, Rows]) -> float:
    _, tested = cut
    return float((predict("linear", features, labels, [cut]) == labels.label)[tested].mean())


def draw_groups(count: int, labels: Labels, cut: tuple[Rows, Rows]) -> Splits:
    """The split with only the samples of `count` groups to fit on, drawn several times; the same for every encoder.

    Raises:
        UserError: there are fewer groups, or a draw has a single class.
    """
    fitted, tested = cut
    rng, groups = np.random.default_rng(count), np.unique(labels.group[fitted])
    if count > len(groups):
        raise UserError(f"--few {count}: there are {len(groups)} groups to fit on. Leave it out, or set fewer.")
    chosen = (rng.choice(groups, count, replace=False) for _ in range(DRAWS))
    draws = [fitted[np.isin(labels.group[fitted], some)] for some in chosen]
    if any(len(np.unique(labels.label[rows])) < 2 for rows in draws):
        raise UserError(f"--few {count}: groups were drawn that have only one class. Leave it out, or set more.")
    return [(rows, tested) for rows in draws]


def accuracies(predicted: Mapping[str, Rows], labels: Labels, tested: Rows) -> dict[str, Any]:
    """The accuracy of each prediction, with its bootstrap interval over groups; None if there is only one."""
    right = {name: (classes == labels.label)[tested, None].astype(np.float64) for name, classes in predicted.items()}
    found = confidence_intervals(right, groups=labels.group[tested])
    return {
        name: {key: None if np.isnan(value) else value for key, value in interval._asdict().items()}
        for name, interval in found.items()
    }


def _seen(encoder: Frozen, index: Index, images: Path, tested: Rows) -> int | None:
    """How many of the tested images trained the encoder; None if that cannot be told."""
    trained = images_that_trained(encoder, images)
    if trained is None:
        log.warning(
            "%s: it is not known whether tested images trained it: its data cannot be read, or its first weights were "
            "trained elsewhere",
            encoder.name,
        )
        return None
    seen = sum((index.root / index.paths[row]).resolve() in trained for row in tested)
    if seen:
        log.warning("%s was trained on %d of the %d tested images", encoder.name, seen, len(tested))
    return seen


def _save_predictions(file: Path, index: Index, labels: Labels, tested: Rows, predictions: Mapping[str, Rows]) -> None:
    """Write the true class of each tested image, and the class that each encoder's logistic regression predicts."""
    text = io.StringIO(newline="")
    table = csv.writer(text)
    table.writerow(["file", "label", *predictions])
    for row in sorted(tested.tolist()):
        classes = [labels.label[row], *(predicted[row] for predicted in predictions.values())]
        table.writerow([index.paths[row], *(labels.classes[number] for number in classes)])
    write_text(file, text.getvalue())
