"""Reads the classes of images, the groups that must stay together, and the parts to fit and to test on."""

from __future__ import annotations

import csv
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Final

import numpy as np
import numpy.typing as npt

from peclr_dali.errors import UserError
from peclr_dali.parsing import regular
from peclr_dali.pipelines.samples.index import Index

Rows = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
Splits = Sequence[tuple[Rows, Rows]]
"""The samples to fit and to test on, once for each split."""

PARTS: Final = ("train", "test")

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Labels:
    """The classes of N samples.

    Attributes:
        classes: the names of the C classes, sorted.
        label: (N,) numbers of classes.
        group: (N,) numbers; samples of one group, such as a person's, are never on both sides of a split.
        test: (N,) bool, the part to test on; None if there are no parts.
    """

    classes: Sequence[str]
    label: Rows
    group: Rows
    test: Bools | None

    def only(self, kept: Bools) -> Labels:
        """The labels of some of the samples, by a mask (N,)."""
        test = None if self.test is None else self.test[kept]
        return replace(self, label=self.label[kept], group=self.group[kept], test=test)


def read_labels(index: Index, table: Path | None = None, groups: str | None = None) -> tuple[Index, Labels]:
    """The samples of a folder's index that have a label, and their labels.

    Args:
        table: CSV with the columns "file" (as in `index.paths`) and "label", and perhaps "part" ("train" or "test").
            None: the first folder of a file's name is its class.
        groups: a column of the table; or a regular expression whose part in parentheses, searched in a file's name, is
            the group. None: every image is a group.

    Raises:
        UserError: the table cannot be read, a line or a name does not fit, there is only one class, or a group is in
            both parts.
    """
    origin = str(index.root if table is None else table)
    line_of = _classes_by_folder(index) if table is None else _read_table(table, index)
    index = index.select(np.array([row for row, path in enumerate(index.paths) if path in line_of], np.int64))
    lines = [line_of[path] for path in index.paths]
    if not lines:
        raise UserError(f"{origin}: labels none of the images in {index.root}. Check the column 'file'.")
    names, label = np.unique([line["label"] for line in lines], return_inverse=True)
    classes: list[str] = names.tolist()
    if len(classes) < 2:
        raise UserError(f"{origin}: all {len(lines)} images have the label {classes[0]!r}; expected several classes")
    group_names, group = np.unique([_group(line, groups, origin) for line in lines], return_inverse=True)
    test = None
    if table is not None and "part" in lines[0]:
        test = np.array([line["part"] == "test" for line in lines])
        if both := np.intersect1d(group[test], group[~test]).tolist():
            raise UserError(
                f"{origin}: group {str(group_names[both[0]])!r} is in both parts, as are {len(both) - 1} others; "
                "expected each group in one part. Correct the column 'part'."
            )
    return index, Labels(classes, label, group, test)


def splits(labels: Labels, folds: int) -> Splits:
    """The samples to fit and to test on: the two parts, or else `folds` folds of whole groups with similar classes.

    Raises:
        UserError: there are too few groups or images, or a class would be tested but not fitted.
    """
    from sklearn.model_selection import StratifiedGroupKFold

    if labels.test is not None:
        found = [(np.flatnonzero(~labels.test), np.flatnonzero(labels.test))]
    else:
        counts = np.bincount(labels.label)
        rarest, groups = int(counts.argmin()), len(np.unique(labels.group))
        if min(counts[rarest], groups) < folds:
            raise UserError(
                f"label {labels.classes[rarest]!r} has {counts[rarest]} images, and there are {groups} groups; "
                f"expected at least {folds} of both for --folds {folds}. Set fewer folds, or add images."
            )
        cutter = StratifiedGroupKFold(folds, shuffle=True, random_state=0)
        found = list(cutter.split(labels.label, labels.label, labels.group))
    for fitted, tested in found:
        if not len(tested):
            raise UserError("a split tests no image: add groups, set fewer folds, or correct the column 'part'")
        if missing := np.setdiff1d(labels.label, labels.label[fitted]).tolist():
            raise UserError(
                f"label {labels.classes[missing[0]]!r} is tested, but no image of it is left to fit on: add images of "
                "other groups to it, or leave it out"
            )
    return found


def _classes_by_folder(index: Index) -> dict[str, Mapping[str, str]]:
    """The first folder of each file's name, as its label."""
    for path in index.paths:
        if "/" not in path:
            raise UserError(
                f"{index.root / path}: is in no folder of a class; expected {index.root}/CLASS/{path}. Move it, or "
                "give --labels"
            )
    return {path: {"file": path, "label": path.partition("/")[0]} for path in index.paths}


def _read_table(table: Path, index: Index) -> dict[str, Mapping[str, str]]:
    """The lines of a CSV by their files."""
    lines: dict[str, Mapping[str, str]] = {}
    known, root = set(index.paths), index.root
    try:
        with regular(table).open(encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file, restval="")
            if lacking := {"file", "label"} - set(reader.fieldnames or ()):
                raise UserError(
                    f"{table}: line 1 has no column {min(lacking)!r}; expected a CSV with a header such as "
                    "file,label,person,part"
                )
            for cells in reader:
                line = {column: (cell or "").strip() for column, cell in cells.items() if column is not None}
                name, problem = line["file"].removeprefix("./"), None
                if name in lines:
                    problem = f"{name} has a label already; expected one line for each image"
                elif name not in known and (
                    PurePosixPath(name).as_posix() != name or not (index.root / name).is_file()
                ):
                    problem = f"there is no image {name!r}; names are relative to {root}, such as {index.paths[0]!r}"
                elif not line["label"]:
                    problem = "the label is empty. Write one, or remove the line."
                elif line.get("part", "train") not in PARTS:
                    problem = f"part is {line['part']!r}; expected 'train' or 'test'"
                if problem is not None:
                    raise UserError(f"{table}: line {reader.line_num}: {problem}")
                lines[name] = line | {"file": name}
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise UserError(f"{table}: {why}; expected a CSV with the columns file and label") from error
    if unused := lines.keys() - known:  # an image without a hand is not in the index
        why = "are not images of the data, or have no box"
        _log.warning("%s: %d of %d files %s, and are not used", table, len(unused), len(lines), why)
    return lines


def _group(line: Mapping[str, str], groups: str | None, origin: str) -> str:
    if groups is None:
        return line["file"]
    if groups in line:
        if not line[groups]:
            raise UserError(f"{origin}: {line['file']} has no {groups}. Write one, or leave --groups out.")
        return line[groups]
    try:
        pattern = re.compile(groups)
    except re.error as error:
        raise UserError(f"--groups {groups}: is no column of {origin}, and no regular expression ({error})") from error
    found = pattern.search(line["file"])
    if pattern.groups != 1 or found is None or found[1] is None:
        raise UserError(
            f"--groups {groups}: is no column of {origin}, and does not match {line['file']} with one part in "
            "parentheses, such as '(person[0-9]+)'"
        )
    return found[1]
