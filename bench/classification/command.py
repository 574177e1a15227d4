"""The command that judges frozen encoders by classes of images."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import click

from peclr_dali.bench.options import output_options
from peclr_dali.errors import UserError
from peclr_dali.errors.terminal import printable
from peclr_dali.train.commands.options import FILE, FOLDER, PATH, IntegerRange, PathOfUser


@click.command()
@click.argument("runs", nargs=-1, required=True, type=PathOfUser(), metavar="RUN...")
@click.option("--images", required=True, type=PATH, metavar="FOLDER", help="Images, with a folder for each class.")
@click.option(
    "--labels",
    "table",
    type=FILE,
    metavar="CSV",
    help="Classes from a file with the columns file and label, not from folders. A column part, with train and test, "
    "replaces the folds.",
)
@click.option(
    "--box", default="center", metavar="FILE", help="File of boxes, as for data.box.  [default: whole images]"
)
@click.option(
    "--groups",
    metavar="COLUMN|PATTERN",
    help="Images of one group, such as a person's, are never on both sides of a split: a column of --labels, or a "
    "regular expression for file names with the group in parentheses.  [default: each image alone]",
)
@click.option("--folds", default=5, show_default=True, type=IntegerRange(2, 100), help="Folds of whole groups.")
@click.option(
    "--few",
    default="",
    metavar="N,N,...",
    help="Also fit to the labels of only N groups; the mean of 10 draws.",
)
@click.option("--out", default="classification", show_default=True, type=FOLDER, help="Folder for results.")
@output_options
def classify(
    runs: Sequence[str],
    images: Path,
    table: Path | None,
    box: str,
    groups: str | None,
    folds: int,
    few: str,
    out: Path,
    tell: Callable[..., None],
) -> None:
    """Judge the frozen encoders of RUNs by how well they tell classes of images apart.

    \b
      python cli.py classify runs/peclr_rn50 imagenet --images photos
      python cli.py classify runs/peclr runs/simclr --images photos --groups '(person[0-9]+)_' --box boxes.csv
      python cli.py classify networks/hand_rn18.safetensors --images photos --labels labels.csv --groups person

    A RUN is the folder of a pre-training or fine-tuning run, a checkpoint, or the word imagenet. Each encoder gets a
    logistic regression on its features and a vote of their 20 nearest neighbours, both by scikit-learn. Beside it are
    constants: the most frequent class, the pixels of the views, and the first RUN's network with random weights.
    Intervals are bootstrapped over groups and do not include the variation between training runs. The results are
    classification.json, predictions.csv and neighbours.png; report --classification puts them on a page.
    """
    counts = few.replace(" ", "").split(",") if few else []
    if not all(re.fullmatch("[1-9][0-9]{0,5}", count) for count in counts):
        raise UserError(f"--few {few}: expected numbers of groups separated by commas, such as 2,5,10")
    import sklearn  # noqa: F401  # before the work begins

    from peclr_dali.bench.classification.classify import classify as judge
    from peclr_dali.bench.rows import as_table
    from peclr_dali.train.runs.log import configure_logging, progress_bar

    configure_logging()
    with progress_bar("features") as progress:
        row = judge(
            runs, images, out, progress, box=box, table=table, groups=groups, folds=folds,
            few=sorted({int(count) for count in counts}),
        )  # fmt: skip
    counts = list(row["encoders"][-1]["few"])
    heads = ("encoder", "logistic regression (95 %)", f"{row['neighbours']} nearest (95 %)",
             *(f"{count} groups" for count in counts), "trained on")  # fmt: skip
    title = f"{row['tested']} images of {row['groups_tested']} groups tested, {len(row['classes'])} classes"
    tell(row, as_table(title, heads, (_line(entry, counts) for entry in row["encoders"])), f"{out}")


def _line(entry: Mapping[str, Any], counts: Sequence[str]) -> list[str]:
    """The cells of an encoder: accuracies in percent, and how many of the tested images trained it."""
    from rich.markup import escape  # imported late, so that --help is fast

    intervals = [entry["accuracy"], entry["nearest_neighbours"]]
    seen = entry["trained_on_tested"]
    return [
        escape(printable(entry["name"])),
        *("" if interval is None else percent(interval) for interval in intervals),
        *(f"{fmean(entry['few'][count]):.1%}" if entry["few"] else "" for count in counts),
        "unknown" if seen is None else str(seen),
    ]


def percent(interval: Mapping[str, Any]) -> str:
    """A share with its interval, if there is one, in percent."""
    value, low, high = (interval[key] for key in ("value", "low", "high"))
    return f"{value:.1%}" + (f" ({low:.1%} to {high:.1%})" if low is not None else "")
