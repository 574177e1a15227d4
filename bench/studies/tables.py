"""The tables of docs/results.md: templates/studies.md.jinja and study.md.jinja in bench/pages/ write them down."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from peclr_dali.bench.rows import Row
from peclr_dali.bench.studies.curves import arms_of_curves, curve_table, gains_between_curves
from peclr_dali.bench.studies.rows import (
    COMPARISON_HEADS,
    CONSTANT_ROTATION,
    FILES,
    OF_THE_DISTANCE,
    SCALES,
    Gain,
    StudyRows,
    claims_of_paper,
    comparison_cells,
    gains,
    improvement,
    mean_and_range,
    study_names,
    study_rows,
)
from peclr_dali.errors import UserError
from peclr_dali.train.config.load import read_toml
from peclr_dali.train.pose.metrics import METRICS

_BEATS: Final = {True: "yes", False: "**no**", None: "-"}
_MAPS: Final = {"rotation_error_px": "equivariance error, rotations", "shift_error_px": "equivariance error, shifts"}
_HEADS: Final = (
    *COMPARISON_HEADS[:2], "errors", "PA-EPE, cm", *COMPARISON_HEADS[2:5], "better by", "published",
    "better than a constant", "the paper's sign", "interval without zero",
)  # fmt: skip


def overview(results: Path) -> dict[str, Any]:
    """Which studies have been run, and the signs of all claims of the paper."""
    studies = []
    found = {scale: claims_of_paper(results, scale) for scale in SCALES}
    claims = [(source, scale, *_claim(gain)) for scale, of_scale in found.items() for source, gain in of_scale]
    for name in study_names():
        study = read_toml(FILES / f"{name}.toml")
        rows = {scale: study_rows(results, name, scale) for scale in SCALES}
        seeds = [rows[scale].seeds() if scale in study["scales"] else None for scale in SCALES]
        studies.append({"title": study["title"], "source": study["source"], "seeds": seeds, "file": name})
        for scale in SCALES:
            claims += [(study["source"], scale, *line) for line in _map_claims(study, rows[scale])]
    return {
        "studies": studies,
        "heads": ("source", "scale", *_HEADS[:2], *_HEADS[6:]),
        "claims": [line[:4] + line[8:] for line in claims],
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
    listed = {line[0] for line in arms}
    compared = (claim.get("metric", "pa_epe_cm") for claim in study.get("compare", ()))
    curve_metrics = dict.fromkeys(("epe_px", "pa_epe_cm", *compared))
    scales = []
    for scale, rows in found.items():
        of_curves, others = gains_between_curves(study, rows, gains(study, rows))
        lines = [_claim(gain, *_errors(gain.row, rows, listed)) for gain in others]
        scales.append(
            {
                "name": scale,
                "possible": scale in study["scales"],
                "rows": rows,
                "curves": [table for metric in curve_metrics if (table := curve_table(study, rows, metric))[1]],
                "curve_gains": of_curves,
                "claims": _without_empty(_HEADS, lines),
                "maps": _without_empty(_HEADS, _map_claims(study, rows)),
                "map_errors": list(_map_errors(study, rows)),
            }
        )
    return {"name": name, "study": study, "heads": heads, "arms": arms, "scales": scales}


def _without_empty(heads: Sequence[str], lines: Sequence[Sequence[str]]) -> tuple[list[str], list[list[str]]]:
    """A table without the columns that have nothing but "-"."""
    kept = [column for column in range(len(heads)) if any(line[column] != "-" for line in lines)]
    return [heads[column] for column in kept], [[line[column] for column in kept] for line in lines]


def _arms(study: Row, found: dict[str, StudyRows]) -> tuple[list[str], list[list[str]]]:
    """Heads, and a line for each arm: means over seeds with the range, and what the paper has.

    Where label curves are shown, the arms of curves and of comparisons are not listed: other tables have them.
    """
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
        mark = " *" if metric in OF_THE_DISTANCE and any(row.get("true_root") for row in rows) else ""
        return mean_and_range([row[metric] for row in rows]) + mark if rows else "-"

    shown = [rows for rows in found.values() if rows.arms]
    elsewhere = set[str].intersection(*(_in_other_tables(study, rows) for rows in shown)) if shown else set[str]()
    names = [name for name in study["arms"] if name not in elsewhere]
    lines = [[name, *(cell(name, *column) for column in columns)] for name in names]
    heads = [f"{METRICS[metric].title_and_unit}, {column}" for metric, column in columns]
    return ["mean and range over seeds", *heads], [line for line in lines if set(line[1:]) != {"-"}]


def _in_other_tables(study: Row, found: StudyRows) -> set[str]:
    """The arms that the tables of label curves and, beside these, of comparisons have."""
    of_curves = arms_of_curves(study, found)
    compared = [gain.row for gain in gains(study, found)] if of_curves else []
    return of_curves | {row[arm] for row in compared for arm in ("better", "than")}


def _claim(gain: Gain, errors: str = "-", pa_epe: str = "-") -> tuple[str, ...]:
    """The line of a comparison that was measured."""
    cells = comparison_cells(gain.row)
    return (
        *cells[:2],
        errors,
        pa_epe,
        *cells[2:5],
        f"{gain.percent:+.1f} %",
        "-" if gain.published is None else f"{gain.published:g} %",
        _BEATS[gain.beats_constants],
        "-" if not gain.claimed else "yes" if gain.percent > 0 else "**no**",
        "yes" if gain.is_clear() else "no",
    )


def _errors(row: Row, found: StudyRows, listed: Collection[str]) -> Iterator[str]:
    """Mean errors of both arms of a comparison, in its metric and in PA-EPE; nothing if both are `listed`."""
    if {row["better"], row["than"]} <= {*listed}:
        return
    for metric in (row["metric"], "pa_epe_cm"):
        arms = [[found.arms[row[arm]][seed] for seed in row["seeds"]] for arm in ("better", "than")]
        known = all(metric in one for of_arm in arms for one in of_arm)
        yield " and ".join(f"{np.mean([one[metric] for one in of_arm]):.2f}" for of_arm in arms) if known else "-"


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
        lines.append((f"{better} minus {than}", what, *"-----", gain, "-", _BEATS[beats], sign, "-"))
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
