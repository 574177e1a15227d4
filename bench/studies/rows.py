"""What has been measured of each study: the files of configs/studies and their rows in bench/results/."""

from __future__ import annotations

from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from bench.rows import Row, rows_of
from train.config.load import read_toml
from train.pose.metrics import METRICS

FILES: Final = Path(__file__).parents[2] / "configs" / "studies"
SCALES: Final = ("small", "paper")
COMPARISON_HEADS: Final = ("", "metric", "each seed", "mean", "95 % interval", "holds")
"""Heads of the cells of `comparison_cells`."""


class StudyRows(NamedTuple):
    """The newest rows of a study at one scale.

    Attributes:
        arms: arm -> seed -> row.
        claims: (better, than, metric) -> row.
        constant: the constant predictions; empty if they were not measured.
        maps: arm -> seed -> row.
    """

    arms: dict[str, dict[int, Row]]
    claims: dict[tuple[str, str, str], Row]
    constant: Row
    maps: dict[str, dict[int, Row]]

    def seeds(self) -> list[int]:
        """The seeds with which any arm was measured."""
        return sorted({seed for rows in self.arms.values() for seed in rows})

    def last(self) -> Row:
        """The newest row of an arm."""
        rows = [row for by_seed in self.arms.values() for row in by_seed.values()]
        return max(rows, key=lambda row: int(row["place"].split()[-1]))


def study_rows(results: Path, study: str, scale: str) -> StudyRows:
    """The rows of a study in the folder `results`; those of arms that its file has no more do not count."""
    arms = read_toml(FILES / f"{study}.toml")["arms"].keys()
    found = StudyRows({}, {}, {}, {})
    for row in rows_of(results / "experiments.jsonl"):
        if (row["study"], row["scale"]) != (study, scale):
            continue
        match row["kind"]:
            case "arm" if row["arm"] in arms:
                found.arms.setdefault(row["arm"], {})[row["seed"]] = row
            case "comparison" if {row["better"], row["than"]} <= arms:
                found.claims[row["better"], row["than"], row["metric"]] = row
            case "constant":
                found = found._replace(constant=row)
            case "map" if row["arm"] in arms:
                found.maps.setdefault(row["arm"], {})[row["seed"]] = row
    return found


def study_names() -> list[str]:
    """Names of all studies, in the order of the paper's figures and tables; then the others."""
    files = {file.stem: read_toml(file) for file in FILES.glob("*.toml")}
    order = ("Figure 6a", "Figure 6b", "Table 1", "Figure 7", "Table 2", "Table 3", "Supplement", "")
    return sorted(
        files,
        key=lambda name: (next(n for n, start in enumerate(order) if files[name]["source"].startswith(start)), name),
    )


class Gain(NamedTuple):
    """How much better one arm of a comparison is than the other.

    Attributes:
        row: the row of the comparison.
        percent: the improvement relative to the worse arm's error, or to the better arm's AUC, as in the paper.
        low: lower end of its 95 % interval.
        high: upper end.
        published: the paper's figure; None: the paper has none.
        claimed: whether the paper says that the arm is better; False: the arms are only compared.
    """

    row: Row
    percent: float
    low: float
    high: float
    published: float | None
    claimed: bool


def gains(study: Row, found: StudyRows) -> list[Gain]:
    """The comparisons of a study that were measured, in the order of its file."""
    made = []
    for claim in study.get("compare", []):
        row = found.claims.get((claim["better"], claim["than"], claim.get("metric", "pa_epe_cm")))
        if row is None:
            continue
        higher = METRICS[row["metric"]].higher_is_better
        rows = found.arms[row["better" if higher else "than"]]
        whole = float(np.mean([rows[seed][row["metric"]] for seed in row["seeds"]]))
        low, mean, high = (100 * row[name] / whole for name in ("low", "mean", "high"))
        if not higher:
            low, mean, high = -high, -mean, -low
        made.append(Gain(row, mean, low, high, claim.get("percent"), claim.get("claimed", True)))
    return made


def claims_of_paper(results: Path, scale: str) -> list[tuple[str, Gain]]:
    """Source and gain of every claim of the paper that was measured at a scale; once, if studies share the networks."""
    found: dict[tuple[str, ...], tuple[str, Gain]] = {}
    for name in study_names():
        study = read_toml(FILES / f"{name}.toml")
        for gain in gains(study, study_rows(results, name, scale)):
            if gain.claimed:
                of = (study.get("out", name), gain.row["better"], gain.row["than"], gain.row["metric"])
                found.setdefault(of, (study["source"], gain))
    return list(found.values())


def improvement(found: StudyRows, better: str, than: str, table: str) -> npt.NDArray[np.float64]:
    """(than - better) / than in percent at each place of the maps, for each seed; NaN where nothing is moved."""
    seeds = sorted(found.maps[better].keys() & found.maps[than].keys())
    ours, theirs = (np.array([found.maps[arm][seed][table] for seed in seeds], float) for arm in (better, than))
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(theirs > 1e-6, 100 * (theirs - ours) / theirs, np.nan)


def comparison_cells(row: Row) -> tuple[str, ...]:
    """The cells of a row of kind "comparison", in the order of `COMPARISON_HEADS`."""
    return (
        f"{row['better']} minus {row['than']}",
        METRICS[row["metric"]].title_and_unit,
        ", ".join(f"{difference:+.3f}" for difference in row["differences"]),
        f"{row['mean']:+.3f}",
        f"{row['low']:+.3f} to {row['high']:+.3f}",
        "yes" if row["holds"] else "no",
    )
