"""Writes docs/results.md: a section for each study of configs/studies, with the paper's figures beside ours."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

import numpy as np

from bench.studies.pictures import picture_of_claims, picture_of_study
from bench.studies.rows import (
    COMPARISON_HEADS,
    FILES,
    SCALES,
    StudyRows,
    comparison_cells,
    gains,
    improvement,
    study_names,
    study_rows,
)
from bench.tables import Row, markdown, measured_on
from errors import UserError
from train.config.load import read_toml
from train.pose.metrics import METRICS

_MAPS: Final = {"rotation_error_px": "equivariance error, rotations", "shift_error_px": "equivariance error, shifts"}


def overview(results: Path) -> str:
    """Which studies have been run, and the signs of all claims of the paper."""
    lines, signs, counted = [], [], set[tuple[str, ...]]()
    for name in study_names():
        study = read_toml(FILES / f"{name}.toml")
        found = {scale: study_rows(results, name, scale) for scale in SCALES}
        run = [_seeds(found[scale]) if scale in study["scales"] else "-" for scale in SCALES]
        lines.append((f"[{study['title']}](#{_anchor(study['title'])})", study["source"], *run))
        for scale in SCALES:
            compared = [*_claims(study, found[scale]), *_map_claims(study, found[scale])]
            for line in compared:
                of = (study.get("out", name), scale, *line[:2])  # two studies may share these networks
                if line[-2] != "-" and of not in counted:
                    counted.add(of)
                    signs.append((study["source"], scale, *line))
    pictures = filter(None, (picture_of_claims(results, scale) for scale in SCALES))
    parts = [_waiting(lines), _same_signs(signs), *(f"{picture.link}\n" for picture in pictures)]
    parts.append(markdown(("study", "source", *(f"scale {scale}" for scale in SCALES)), lines))
    if signs:
        heads = ("source", "scale", *_CLAIM_HEADS)
        keep = [heads.index(head) for head in ("source", "scale", "", "metric", *_CLAIM_HEADS[4:])]
        chosen = [[line[column] for column in keep] for line in signs]
        parts.append(markdown([heads[column] for column in keep], chosen))
    return "\n".join(filter(None, parts))


_NOT_RUN: Final = "not run yet"


def _seeds(found: StudyRows) -> str:
    seeds = found.seeds()
    return f"seeds {_listed(seeds)}" if seeds else _NOT_RUN


def _waiting(lines: Sequence[tuple[str, ...]]) -> str:
    """The studies that have not been run, in words; `lines` are those of the table of all studies."""
    said = []
    for place, scale in enumerate(SCALES, 2):
        could = [line for line in lines if line[place] != "-"]
        missing = [line for line in could if line[place] == _NOT_RUN]
        if missing:
            named = "; ".join(line[1] if line[1].startswith(("Figure", "Table")) else line[0] for line in missing)
            said.append(f"At scale {scale}: {'everything' if missing == could else named}.")
    return f"**Not run yet.** {' '.join(said)}\n" if said else ""


def _same_signs(signs: Sequence[tuple[str, ...]]) -> str:
    """How many claims have the paper's sign."""
    same = [line for line in signs if line[-2] == "yes"]
    shown = sum(line[-1] == "yes" for line in same)
    return (
        f"Of the {len(signs)} claims that were measured, {shown} have the paper's sign and an interval that does not "
        f"contain zero. {len(same) - shown} more have the paper's sign.\n"
        if signs
        else ""
    )


def tables(results: Path, name: str) -> str:
    """The section of a study: what was run, the arms with the published figures, the claims, the maps.

    Raises:
        UserError: there is no such study.
    """
    if not (FILES / f"{name}.toml").exists():
        raise UserError(
            f"<!-- rows: study {name} -->: expected the name of a file in {FILES.name}: {_listed(study_names())}"
        )
    study = read_toml(FILES / f"{name}.toml")
    found = {scale: study_rows(results, name, scale) for scale in SCALES}
    parts = [f"Source: {study['source']}. File: `configs/studies/{name}.toml`. {study.get('note', '')}".strip() + "\n"]
    parts += [f"{_what_was_run(study, scale, found[scale])}\n" for scale in SCALES if scale in study["scales"]]
    parts.append(_arms(study, found))
    for scale in SCALES:
        if found[scale].claims:
            lines = _claims(study, found[scale])
            parts.append(f"Scale {scale}, the first arm minus the second:\n\n{markdown(_CLAIM_HEADS, lines)}")
        if said := _order(study, found[scale]):
            parts.append(f"{said}\n")
        if "rigid_hand_pa_epe_cm" in (constant := found[scale].constant):
            parts.append(
                f"PA-EPE of constant predictions, scale {scale}: the mean pose "
                f"{constant['mean_pose_pa_epe_cm']:.3f} cm, one rigid hand {constant['rigid_hand_pa_epe_cm']:.3f} cm.\n"
            )
        if lines := _map_claims(study, found[scale]):
            parts.append(f"Maps at scale {scale}:\n\n{markdown(_CLAIM_HEADS, lines)}")
        if picture := picture_of_study(name, study, scale, found[scale]):
            parts.append(f"{picture.link}\n")
    return "\n".join(filter(None, parts))


def _what_was_run(study: Row, scale: str, found: StudyRows) -> str:
    rows = [row for by_seed in found.arms.values() for row in by_seed.values()]
    if not rows:
        return f"Scale {scale}: **not run yet**."
    last = max(rows, key=lambda row: int(row["place"].split()[-1]))
    minutes = [seconds / 60 for seconds in found.cpu_seconds().values()]
    took = f", {_span(minutes)} minutes of CPU time each, pre-training included" if any(minutes) else ""
    here = [name for name, arm in study["arms"].items() if arm.get("only", scale) == scale]
    missing = [name for name in here if name not in found.arms]
    waiting = f" **Not run yet**: {_listed(missing)}." if missing else ""
    return f"Scale {scale}: {len(found.seeds())} seeds{took}.{waiting} Last row: {measured_on(last)}."


def _arms(study: Row, found: dict[str, StudyRows]) -> str:
    """A line for each arm: means over seeds with the range, and what the paper has."""
    published = {name: arm.get("published", {}) for name, arm in study["arms"].items()}
    wanted = {metric for figures in published.values() for metric in figures}
    wanted |= {claim.get("metric", "pa_epe_cm") for claim in study.get("compare", [])}
    metrics = [metric for metric in METRICS if metric in (wanted or {"pa_epe_cm", "epe_px"})]
    run = [scale for scale in SCALES if found[scale].arms]
    columns: list[tuple[str, str]] = []
    for metric in metrics:
        columns += [(metric, scale) for scale in run]
        if any(metric in figures for figures in published.values()):
            columns.append((metric, "published"))
    if not columns:
        return ""

    def cell(name: str, metric: str, column: str) -> str:
        if column == "published":
            return f"{published[name][metric]:g}" if metric in published[name] else "-"
        values = [row[metric] for row in found[column].arms.get(name, {}).values() if metric in row]
        if not values:
            return "-"
        spread = f" ({min(values):.3f} to {max(values):.3f})" if len(values) > 1 else ""
        return f"{np.mean(values):.3f}{spread}"

    lines = [(name, *(cell(name, *column) for column in columns)) for name in study["arms"]]
    kept = [line for line in lines if set(line[1:]) != {"-"}]
    heads = (
        "mean and range over seeds",
        *(f"{METRICS[metric].title_and_unit}, {column}" for metric, column in columns),
    )
    return markdown(heads, kept)


_CLAIM_HEADS: Final = (*COMPARISON_HEADS[:5], "better by", "published", "the paper's sign", "interval without zero")


def _claims(study: Row, found: StudyRows) -> list[tuple[str, ...]]:
    """A line for each comparison that was measured, in the order of the file."""
    return [
        (
            *comparison_cells(gain.row)[:5],
            f"{gain.percent:+.1f} %",
            "-" if gain.published is None else f"{gain.published:g} %",
            "-" if not gain.claimed else "yes" if gain.percent > 0 else "**no**",
            "yes" if gain.shown else "no",
        )
        for gain in gains(study, found)
    ]


def _order(study: Row, found: StudyRows) -> str:
    """The arms from best to worst in the first metric that is compared, and the paper's order if it has figures."""
    metric = next((claim.get("metric", "pa_epe_cm") for claim in study.get("compare", [])), "pa_epe_cm")
    means = {name: found.mean(name, metric) for name in study["arms"]}
    figures = {
        name: arm["published"][metric] for name, arm in study["arms"].items() if metric in arm.get("published", {})
    }
    said = []
    for of, values in (("Best first", means), ("In the paper", figures)):
        known = {name: value for name, value in values.items() if np.isfinite(value)}
        if len(known) > 2 and any(np.isfinite(value) for value in means.values()):
            names = sorted(known, key=lambda name: known[name], reverse=METRICS[metric].higher_is_better)
            said.append(f"{of} in {METRICS[metric].title_and_unit}: {_listed(names)}.")
    return " ".join(said)


def _map_claims(study: Row, found: StudyRows) -> list[tuple[str, ...]]:
    """Lines like those of `_claims`, for the claim that the improvement is positive at all places of the maps."""
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


def _span(values: Sequence[float]) -> str:
    return " to ".join(dict.fromkeys(f"{value:.1f}" for value in (min(values), max(values))))


def _listed(values: Iterable[object]) -> str:
    return ", ".join(map(str, values))


def _anchor(title: str) -> str:
    """The link to a heading, as GitHub makes it."""
    kept = "".join(letter for letter in title.lower() if letter.isalnum() or letter in " -_")
    return kept.replace(" ", "-")
