"""What docs/results.md says of the studies of configs/studies, with the paper's figures beside ours.

The tables are in bench/pages/templates/studies.md.jinja and study.md.jinja.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import numpy as np

from bench.rows import Row
from bench.studies.rows import (
    COMPARISON_HEADS,
    FILES,
    SCALES,
    Gain,
    StudyRows,
    claims_of_paper,
    comparison_cells,
    gains,
    improvement,
    study_names,
    study_rows,
)
from errors import UserError
from train.config.load import read_toml
from train.pose.metrics import METRICS

_MAPS: Final = {"rotation_error_px": "equivariance error, rotations", "shift_error_px": "equivariance error, shifts"}
_HEADS: Final = (*COMPARISON_HEADS[:5], "better by", "published", "the paper's sign", "interval without zero")


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
        }
        for scale, rows in found.items()
    ]  # fmt: skip
    return {"name": name, "study": study, "heads": heads, "arms": arms, "claim_heads": _HEADS, "scales": scales}


def _arms(study: Row, found: dict[str, StudyRows]) -> tuple[list[str], list[list[str]]]:
    """Heads, and a line for each arm: means over seeds with the range, and what the paper has."""
    published = {name: arm.get("published", {}) for name, arm in study["arms"].items()}
    wanted = {metric for figures in published.values() for metric in figures}
    wanted |= {claim.get("metric", "pa_epe_cm") for claim in study.get("compare", [])}
    columns = [
        (metric, column)
        for metric in METRICS
        if metric in (wanted or {"pa_epe_cm", "epe_px"})
        for column in (*(scale for scale in SCALES if found[scale].arms), "published")
        if column != "published" or any(metric in figures for figures in published.values())
    ]

    def cell(name: str, metric: str, column: str) -> str:
        if column == "published":
            return f"{published[name][metric]:g}" if metric in published[name] else "-"
        values = [row[metric] for row in found[column].arms.get(name, {}).values() if metric in row]
        spread = f" ({min(values):.3f} to {max(values):.3f})" if len(values) > 1 else ""
        return f"{np.mean(values):.3f}{spread}" if values else "-"

    lines = [[name, *(cell(name, *column) for column in columns)] for name in study["arms"]]
    heads = [f"{METRICS[metric].title_and_unit}, {column}" for metric, column in columns]
    return ["mean and range over seeds", *heads], [line for line in lines if set(line[1:]) != {"-"}]


def _claim(gain: Gain) -> tuple[str, ...]:
    """The line of a comparison that was measured."""
    return (
        *comparison_cells(gain.row)[:5],
        f"{gain.percent:+.1f} %",
        "-" if gain.published is None else f"{gain.published:g} %",
        "-" if not gain.claimed else "yes" if gain.percent > 0 else "**no**",
        "yes" if gain.low > 0 or gain.high < 0 else "no",
    )


def _map_claims(study: Row, found: StudyRows) -> list[tuple[str, ...]]:
    """Lines like those of `_claim`, for the claim that the improvement is positive at all places of the maps."""
    lines: list[tuple[str, ...]] = []
    for table, what in _MAPS.items() if found.maps else ():
        mean = improvement(found, study["maps"]["better"], study["maps"]["than"], table).mean(axis=0)
        known = mean[np.isfinite(mean)]
        positive, size = int((known > 0).sum()), known.size
        sign = "yes" if positive == size else f"**no**, at {positive} of {size} places"
        span = f"{known.min():+.1f} to {known.max():+.1f} % over the places"
        names = f"{study['maps']['better']} minus {study['maps']['than']}"
        lines.append((names, what, "-", "-", span, f"{known.mean():+.1f} %", "-", sign, "-"))
    return lines


def _anchor(title: str) -> str:
    """The link to a heading, as GitHub makes it."""
    kept = "".join(letter for letter in title.lower() if letter.isalnum() or letter in " -_")
    return kept.replace(" ", "-")
