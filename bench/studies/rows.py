"""What has been measured of each study: the files of configs/studies and their rows in bench/results/.

`tables.py` makes the tables of docs/results.md from them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from peclr_dali.bench.rows import Row, rows_of
from peclr_dali.train.config.load import read_toml
from peclr_dali.train.pose.metrics import METRICS

FILES: Final = Path(__file__).parents[2] / "configs" / "studies"
SCALES: Final = ("small", "paper")
COMPARISON_HEADS: Final = ("", "metric", "each seed", "mean", "95 % interval", "holds")
"""Heads of the cells of `comparison_cells`."""
OF_THE_DISTANCE: Final = ("epe_cm", "auc")
"""Metrics that count the distance to the camera. A read-out has it from the size of predicted bones alone, which shrink
where it is unsure; so these metrics measure the shrinking, unless the root's depth was the label's ("true_root")."""
CONSTANT_ROTATION: Final = "constant_rotation_error_px"
"""Key of a map's row, see `peclr_dali.experiments.measure.measure_maps`. Rows from before it have none."""
_CONSTANTS: Final = {
    "epe_cm": ("mean_joints_epe_cm",),
    "auc": ("mean_joints_auc",),
    "pa_epe_cm": ("mean_pose_pa_epe_cm", "rigid_hand_pa_epe_cm"),
    "epe_px": ("mean_keypoints_epe_px",),
}
"""Metric -> keys of a constant's row: errors of predictions that do not look at the picture."""


class StudyRows(NamedTuple):
    """The newest rows of a study at one scale.

    Attributes:
        arms: arm -> seed -> row.
        claims: (better, than, metric) -> row.
        constant: the constant predictions; empty if they were not measured.
        maps: arm -> seed -> row.
        pretrain: arm -> seed -> row, of pre-trainings with a probe.
    """

    arms: dict[str, dict[int, Row]]
    claims: dict[tuple[str, str, str], Row]
    constant: Row
    maps: dict[str, dict[int, Row]]
    pretrain: dict[str, dict[int, Row]]

    def figures(self) -> list[Row]:
        """The rows of all arms."""
        return [row for by_seed in self.arms.values() for row in by_seed.values()]

    def seeds(self) -> list[int]:
        """The seeds with which any arm was measured."""
        return sorted({seed for rows in self.arms.values() for seed in rows})

    def last(self) -> Row:
        """The newest row of an arm."""
        return max(self.figures(), key=lambda row: int(row["place"].split()[-1]))


def study_rows(results: Path, study: str, scale: str) -> StudyRows:
    """The rows of a study in the folder `results`, without the distance to the camera where read-outs were measured.

    Rows of arms that the study's file has no more do not count.
    """
    content = read_toml(FILES / f"{study}.toml")
    arms = content["arms"].keys()
    by_of = {name: arm.get("by", content["scales"].get(scale, {}).get("by")) for name, arm in content["arms"].items()}
    found = StudyRows({}, {}, {}, {}, {})
    for row in rows_of(results / "experiments.jsonl"):
        if (row["study"], row["scale"]) != (study, scale):
            continue
        match row["kind"]:
            case "arm" if row["arm"] in arms:
                is_unsure = by_of[row["arm"]] == "probe" and not row.get("true_root")
                left_out = OF_THE_DISTANCE if is_unsure else ()
                kept = {key: value for key, value in row.items() if key not in left_out}
                found.arms.setdefault(row["arm"], {})[row["seed"]] = kept
            case "comparison" if {row["better"], row["than"]} <= arms:
                if row["metric"] in OF_THE_DISTANCE and "probe" in (by_of[row["better"]], by_of[row["than"]]):
                    continue
                found.claims[row["better"], row["than"], row["metric"]] = row
            case "constant":
                found = found._replace(constant=row)
            case "map" if row["arm"] in arms:
                found.maps.setdefault(row["arm"], {})[row["seed"]] = row
            case "pretrain" if row["arm"] in content.get("pretrain", {}) and "probe_step" in row:
                found.pretrain.setdefault(row["arm"], {})[row["seed"]] = row
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
        title: the comparison in plain words.
        percent: the improvement relative to the worse arm's error, or to the better arm's AUC, as in the paper.
        low: lower end of its 95 % interval.
        high: upper end.
        published: the paper's figure; None: the paper has none.
        claimed: whether the paper says that the arm is better; False: the arms are only compared.
        beats_constants: whether both arms are better in this metric than all constants; None: no constant was measured.
    """

    row: Row
    title: str
    percent: float
    low: float
    high: float
    published: float | None
    claimed: bool
    beats_constants: bool | None

    def is_clear(self) -> bool:
        """Whether the interval does not contain zero."""
        return self.low > 0 or self.high < 0


def gains(study: Row, found: StudyRows) -> list[Gain]:
    """The comparisons of a study that were measured, in the order of its file."""
    made = []
    for claim in study.get("compare", []):
        row = found.claims.get((claim["better"], claim["than"], claim.get("metric", "pa_epe_cm")))
        if row is None:
            continue
        metric = row["metric"]
        better, than = (
            float(np.mean([found.arms[row[arm]][seed][metric] for seed in row["seeds"]])) for arm in ("better", "than")
        )
        higher = METRICS[metric].higher_is_better
        low, mean, high = (100 * row[name] / (better if higher else than) for name in ("low", "mean", "high"))
        if not higher:
            low, mean, high = -high, -mean, -low
        beats = None
        if (constant := best_constant(found, metric)) is not None:
            beats = min(better, than) > constant if higher else max(better, than) < constant
        title = claim.get("title", f"{row['better']} over {row['than']}")
        published, claimed = claim.get("percent"), claim.get("claimed", True)
        made.append(Gain(row, title, mean, low, high, published, claimed, beats))
    return made


def best_constant(found: StudyRows, metric: str) -> float | None:
    """The best of the predictions that do not look at the picture; None if none was measured in this metric."""
    values = [float(found.constant[key]) for key in _CONSTANTS.get(metric, ()) if key in found.constant]
    return (max if METRICS[metric].higher_is_better else min)(values, default=None)


def claims_of_paper(results: Path, scale: str) -> list[tuple[str, Gain]]:
    """Source and gain of every claim of the paper that was measured at a scale."""
    found = []
    for name in study_names():
        study = read_toml(FILES / f"{name}.toml")
        gained = gains(study, study_rows(results, name, scale))
        found += [(study["source"], gain) for gain in gained if gain.claimed]
    return found


def improvement(found: StudyRows, better: str, than: str, table: str) -> npt.NDArray[np.float64]:
    """(than - better) / than in percent at each place of the maps, for each seed; NaN where nothing is moved."""
    seeds = sorted(found.maps[better].keys() & found.maps[than].keys())
    ours, theirs = (np.array([found.maps[arm][seed][table] for seed in seeds], float) for arm in (better, than))
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(theirs > 1e-6, 100 * (theirs - ours) / theirs, np.nan)


def mean_and_range(values: Sequence[float], decimals: int = 3) -> str:
    """A mean over seeds, and the range if there are several."""
    spread = f" ({min(values):.{decimals}f} to {max(values):.{decimals}f})" if len(values) > 1 else ""
    return f"{np.mean(values):.{decimals}f}{spread}"


def comparison_cells(row: Row) -> tuple[str, ...]:
    """The cells of a row of kind "comparison", in the order of `COMPARISON_HEADS`."""
    each = row["differences"]
    return (
        f"{row['better']} minus {row['than']}",
        METRICS[row["metric"]].title_and_unit,
        ", ".join(f"{one:+.3f}" for one in each)
        if len(each) <= 6
        else f"{len(each)} seeds, {min(each):+.3f} to {max(each):+.3f}",
        f"{row['mean']:+.3f}",
        f"{row['low']:+.3f} to {row['high']:+.3f}",
        "yes" if row["holds"] else "no",
    )
