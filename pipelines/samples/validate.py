"""Judges the labels of samples by the rules, whatever source they are from."""

import logging
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from peclr_dali.errors import UserError
from peclr_dali.pipelines.arrays import AnyArray, DoubleArray, IntArray
from peclr_dali.pipelines.files.check import image_sizes_px, spread
from peclr_dali.pipelines.samples.index import Index
from peclr_dali.pipelines.samples.rules import RULES, Rule

_SAMPLED = 64
"""Largest number of images whose size is read."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Fault:
    """What a rule finds in an index.

    Attributes:
        rows: (M,) the wrong samples, at least one.
        judged: number of samples that the rule could judge.
        shown: the tables whose rows are shown, (N, ...) each.
    """

    rule: Rule
    index: Index
    rows: IntArray
    judged: int
    shown: dict[str, AnyArray]

    @property
    def found(self) -> str:
        """How many of how many samples are wrong, and what is."""
        return f"{len(self.rows)} of {self.judged} {self.rule.found}"

    def numbers(self, row: int) -> str:
        """A sample's first numbers in the tables that are shown."""
        words = [f"row {row}"]
        for name, table in self.shown.items():
            words.append(f"{name} {', '.join(f'{number:g}' for number in table[row].ravel()[:9].tolist())}")
        return "; ".join(words)

    def __str__(self) -> str:
        place, first = self.index.label_file or self.index.root, int(self.rows[0])
        example = f"{self.index.paths[first]} ({self.numbers(first)})"
        return f"{place}: {self.found}, the first is {example}. {self.rule.expected}"


def validate(index: Index) -> None:
    """Judge the labels of an index by all rules. The sizes of a few images are read.

    A warning counts what a rule finds, if other samples may be right.

    Raises:
        UserError: a rule finds so many wrong samples that nothing can be right.
    """
    for fault in find_faults(index, _sampled_sizes_px(index)):
        if len(fault.rows) > fault.rule.most * fault.judged:
            raise UserError(str(fault))
        _log.warning("%s They are used as they are. 'python cli.py check-data' lists them, to leave them out", fault)


def find_faults(index: Index, size_px: DoubleArray) -> Iterator[Fault]:
    """What the rules find in an index, in their order.

    Args:
        size_px: (N, 2), width and height of the images as displayed, NaN where they are not known.
    """
    tables: dict[str, AnyArray] = {"size_px": size_px, **index.tables}
    if index.one_size:
        tables["common_size_px"] = size_px
    for rule in RULES:
        if all(name in tables for name in rule.tables):
            with np.errstate(all="ignore"):  # labels may be any numbers
                judged, wrong = rule.masks(tables)
            rows = np.flatnonzero(judged & wrong)
            if len(rows):
                shown = {name: tables[name] for name in rule.tables[:2]}
                yield Fault(rule, index, rows, int(judged.sum()), shown)


def _sampled_sizes_px(index: Index) -> DoubleArray:
    """Widths and heights (N, 2) of the images of a few boxes, NaN of all others."""
    boxed = np.flatnonzero(index.box_px[:, 2] > 0)
    rows = boxed[spread(len(boxed), _SAMPLED)]
    size_px = np.full((len(index), 2), np.nan)
    size_px[rows] = image_sizes_px(index.read, rows.tolist())[:, ::-1]
    size_px[size_px == 0] = np.nan  # of an image that cannot be read
    return size_px
