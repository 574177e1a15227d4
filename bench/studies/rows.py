"""What has been measured of each study: the files of configs/studies and their rows in bench/results/.

The tables of docs/results.md are in bench/pages/templates/studies.md.jinja and study.md.jinja.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from peclr_dali.bench.rows import Row, rows_of
from peclr_dali.errors import UserError
from peclr_dali.train.config.load import read_toml
from peclr_dali.train.pose.metrics import METRICS

FILES: Final = Path(__file__).parents[2] / "configs" / "studies"
SCALES: Final = ("small", "paper")
COMPARISON_HEADS: Final = ("", "metric", "each seed", "mean", "95 % interval", "holds")
"""Heads of the cells of `comparison_cells`."""
_BEATS: Final = {True: "yes", False: "**no**", None: "-"}
_OF_THE_DISTANCE: Final = ("epe_cm", "auc")
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
_MAPS: Final = {"rotation_error_px": "equivariance error, rotations", "shift_error_px": "equivariance error, shifts"}
_HEADS: Final = (
    *COMPARISON_HEADS[:5], "better by", "published", "better than a constant", "the paper's sign",
    "interval without zero",
)  # fmt: skip


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
                left_out = _OF_THE_DISTANCE if is_unsure else ()
                kept = {key: value for key, value in row.items() if key not in left_out}
                found.arms.setdefault(row["arm"], {})[row["seed"]] = kept
            case "comparison" if {row["better"], row["than"]} <= arms:
                if row["metric"] in _OF_THE_DISTANCE and "probe" in (by_of[row["better"]], by_of[row["than"]]):
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
        constants = [found.constant[key] for key in _CONSTANTS.get(metric, ()) if key in found.constant]
        beats = None
        if constants:
            beats = min(better, than) > max(constants) if higher else max(better, than) < min(constants)
        title = claim.get("title", f"{row['better']} over {row['than']}")
        made.append(Gain(row, title, mean, low, high, claim.get("percent"), claim.get("claimed", True), beats))
    return made


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


def label_curves(study: Row, found: StudyRows, metric: str) -> dict[str, dict[float, list[float]]]:
    """Errors over the amount of labels: start of the network -> amount -> an error for each seed.

    They are of arms named START_NUMBER or START_all whose settings have data.label_fraction, a share, or a file
    labelled_NUMBER.csv of boxes; a start with one amount has no curve.
    """
    curves: dict[str, dict[float, list[float]]] = {}
    for name, arm in study["arms"].items():
        values = [row[metric] for row in found.arms.get(name, {}).values() if metric in row]
        start = _start_of(name)
        amount = re.search(r"data\.label_fraction=(\S+)|labelled_(\d+)\.csv", " ".join(arm.get("set", ())))
        if start and amount and values:
            curves.setdefault(start, {})[float(amount[1] or amount[2])] = values
    return {start: curve for start, curve in curves.items() if len(curve) > 1}


def _start_of(name: str) -> str | None:
    found = re.fullmatch(r"(.+)_(?:\d+|all)", name)
    return found[1] if found else None


def amount_in_words(amount: float) -> str:
    """An amount of labels: a share up to 1 in percent, or a number."""
    return f"{100 * amount:g} %" if amount <= 1 else f"{amount:,g}"


def curve_table(curves: Mapping[str, Mapping[float, Sequence[float]]]) -> tuple[list[str], list[list[str]]]:
    """Label curves as a table: heads, and a line for each start with a column for each amount."""
    amounts = sorted({amount for curve in curves.values() for amount in curve})
    lines = [
        [start, *(_mean_and_range(curve[amount], 1) if amount in curve else "-" for amount in amounts)]
        for start, curve in curves.items()
    ]
    return ["2D EPE, px, by the labels", *map(amount_in_words, amounts)], lines


def _mean_and_range(values: Sequence[float], decimals: int = 3) -> str:
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


def overview(results: Path) -> dict[str, Any]:
    """Which studies have been run, and the signs of all claims of the paper."""
    studies = []
    found = {scale: claims_of_paper(results, scale) for scale in SCALES}
    claims = [(source, scale, *_claim(gain)) for scale, of_scale in found.items() for source, gain in of_scale]
    for name in study_names():
        study = read_toml(FILES / f"{name}.toml")
        rows = {scale: study_rows(results, name, scale) for scale in SCALES}
        seeds = [rows[scale].seeds() if scale in study["scales"] else None for scale in SCALES]
        studies.append({"title": study["title"], "source": study["source"], "seeds": seeds})
        for scale in SCALES:
            claims += [(study["source"], scale, *line) for line in _map_claims(study, rows[scale])]
    return {
        "studies": studies,
        "heads": ("source", "scale", *_HEADS[:2], *_HEADS[4:]),
        "claims": [line[:4] + line[6:] for line in claims],
        "pictures": [scale for scale in SCALES if found[scale]],
        "anchor": _anchor,
    }


def section(results: Path, name: str) -> dict[str, Any]:
    """The section of a study: what was run, the arms with the published figures, the claims, the maps.

    Raises:
        UserError: there is no such study.
    """
    if name not in study_names():
        raise UserError(
            f"<!-- rows: study {name} -->: expected the name of a file in {FILES.name}: {', '.join(study_names())}"
        )
    study = read_toml(FILES / f"{name}.toml")
    found = {scale: study_rows(results, name, scale) for scale in SCALES}
    heads, arms = _arms(study, found)
    scales = [
        {
            "name": scale,
            "possible": scale in study["scales"],
            "rows": rows,
            "claims": [_claim(gain) for gain in gains(study, rows)],
            "maps": _map_claims(study, rows),
            "map_errors": list(_map_errors(study, rows)),
            "curves": curve_table(label_curves(study, rows, "epe_px")),
        }
        for scale, rows in found.items()
    ]  # fmt: skip
    return {"name": name, "study": study, "heads": heads, "arms": arms, "claim_heads": _HEADS, "scales": scales}


def _arms(study: Row, found: dict[str, StudyRows]) -> tuple[list[str], list[list[str]]]:
    """Heads, and a line for each arm without a label curve: means over seeds with the range, and what the paper has."""
    published = {name: arm.get("published", {}) for name, arm in study["arms"].items()}
    wanted = {metric for figures in published.values() for metric in figures}
    wanted |= {claim.get("metric", "pa_epe_cm") for claim in study.get("compare", [])}
    columns = [
        (metric, column)
        for metric in METRICS
        if metric in (wanted or {"pa_epe_cm"}) | {"epe_px"}
        for column in (*SCALES, "published")
        if any(
            metric in figures for figures in (published.values() if column == "published" else found[column].figures())
        )
    ]

    def cell(name: str, metric: str, column: str) -> str:
        if column == "published":
            return f"{published[name][metric]:g}" if metric in published[name] else "-"
        rows = [row for row in found[column].arms.get(name, {}).values() if metric in row]
        mark = " *" if metric in _OF_THE_DISTANCE and any(row.get("true_root") for row in rows) else ""
        return _mean_and_range([row[metric] for row in rows]) + mark if rows else "-"

    in_curves: set[str] = set()
    if {metric for metric, _ in columns} == {"epe_px"}:  # which the table of the curves has
        in_curves = {start for rows in found.values() for start in label_curves(study, rows, "epe_px")}
    names = [name for name in study["arms"] if _start_of(name) not in in_curves]
    lines = [[name, *(cell(name, *column) for column in columns)] for name in names]
    heads = [f"{METRICS[metric].title_and_unit}, {column}" for metric, column in columns]
    return ["mean and range over seeds", *heads], [line for line in lines if set(line[1:]) != {"-"}]


def _claim(gain: Gain) -> tuple[str, ...]:
    """The line of a comparison that was measured."""
    return (
        *comparison_cells(gain.row)[:5],
        f"{gain.percent:+.1f} %",
        "-" if gain.published is None else f"{gain.published:g} %",
        _BEATS[gain.beats_constants],
        "-" if not gain.claimed else "yes" if gain.percent > 0 else "**no**",
        "yes" if gain.low > 0 or gain.high < 0 else "no",
    )


def _map_claims(study: Row, found: StudyRows) -> list[tuple[str, ...]]:
    """Lines like those of `_claim`, for the claim that the improvement is positive at all places of the maps.

    There is no interval: the range is that of the means over seeds, from place to place.
    """
    lines: list[tuple[str, ...]] = []
    for table, what in _MAPS.items() if found.maps else ():
        better, than = study["maps"]["better"], study["maps"]["than"]
        mean = improvement(found, better, than, table).mean(axis=0)
        known = mean[np.isfinite(mean)]
        positive, size = int((known > 0).sum()), known.size
        sign = "yes" if positive == size else f"**no**, at {positive} of {size} places"
        gain = f"{known.mean():+.1f} %, from {known.min():+.1f} to {known.max():+.1f} % over the places"
        constant = _constant_map(next(iter(found.maps[better].values())), table)
        errors = [np.mean([row[table] for row in found.maps[arm].values()]) for arm in (better, than)]
        beats = None if constant is None else bool(max(errors) < np.mean(constant))
        lines.append((f"{better} minus {than}", what, "-", "-", "-", gain, "-", _BEATS[beats], sign, "-"))
    return lines


def _constant_map(row: Row, table: str) -> npt.NDArray[np.float64] | None:
    """The equivariance error of the mean keypoints, which do not look at the view, at each place; None if unknown."""
    if table == "shift_error_px":  # the shift itself
        return np.asarray(np.hypot(*np.meshgrid(row["shift_px"], row["shift_px"])), float)
    found = row.get(CONSTANT_ROTATION)
    return None if found is None else np.asarray(found, float)


def _map_errors(study: Row, found: StudyRows) -> Iterator[tuple[str, ...]]:
    """The heads, and a line for each angle and each length of a shift: mean errors of both arms, and of a constant.

    Means over seeds and places; pixels are those of a view of 128.
    """
    if not found.maps:
        return
    arms = [study["maps"][name] for name in ("better", "than")]
    yield ("px of 128, mean over seeds and places", *arms, "the mean keypoints, a constant")
    row = next(iter(found.maps[arms[0]].values()))
    lengths = np.hypot(*np.meshgrid(row["shift_px"], row["shift_px"]))
    for what, table, distances in (
        ("rotation by {:g} degrees", "rotation_error_px", np.abs(row["rotation_deg"])),
        ("shift by {:.3g} px", "shift_error_px", lengths),
    ):
        constant = _constant_map(row, table)
        for distance in filter(None, np.unique(distances.round(3))):
            at = np.isclose(distances, distance, atol=1e-3)
            tables = [[of_seed[table] for of_seed in found.maps[arm].values()] for arm in arms]
            means = [np.asarray(one)[..., at].mean() for one in (*tables, *([] if constant is None else [constant]))]
            yield (what.format(distance), *(f"{mean:.1f}" for mean in means), *(["not measured"] * (3 - len(means))))


def _anchor(title: str) -> str:
    """The link to a heading, as GitHub makes it."""
    kept = "".join(letter for letter in title.lower() if letter.isalnum() or letter in " -_")
    return kept.replace(" ", "-")
