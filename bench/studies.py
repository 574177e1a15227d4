"""Writes docs/results.md: a section for each study of configs/studies, with the paper's figures beside ours."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
from matplotlib.figure import Figure

from bench.tables import Row, markdown, measured_on, rows_of
from errors import UserError
from train.config.load import read_toml
from train.pictures import save_figure
from train.pose.metrics import METRICS

FILES: Final = Path(__file__).parents[1] / "configs" / "studies"
SCALES: Final = ("small", "paper")
_MAPS: Final = {"rotation_error_px": "equivariance error, rotations", "shift_error_px": "equivariance error, shifts"}
_BETTER, _WORSE, _SEED = "#2f6f4f", "#b3412f", "#9aa5b1"

COMPARISON_HEADS: Final = ("", "metric", "each seed", "mean", "95 % interval", "holds")
"""Heads of the cells of `comparison_cells`."""


class _Results(NamedTuple):
    """The newest rows of a study at one scale.

    Attributes:
        arms: arm -> seed -> row.
        claims: (better, than, metric) -> row.
        seconds: CPU seconds of each seed.
        constant: the constant predictions; empty if they were not measured.
        maps: arm -> seed -> row.
    """

    arms: dict[str, dict[int, Row]]
    claims: dict[tuple[str, str, str], Row]
    seconds: dict[int, float]
    constant: Row
    maps: dict[str, dict[int, Row]]

    def mean(self, arm: str, metric: str, seeds: Iterable[int] | None = None) -> float:
        """Mean over seeds of an arm's metric; NaN if there is none."""
        rows = self.arms.get(arm, {})
        found = [rows[seed][metric] for seed in (rows if seeds is None else seeds) if metric in rows.get(seed, {})]
        return float(np.mean(found)) if found else float("nan")


def _results(results: Path, study: str, scale: str) -> _Results:
    found = _Results({}, {}, {}, {}, {})
    for row in rows_of(results / "experiments.jsonl"):
        # The first rows were written when there was one study.
        if (row.get("study", "hands"), row.get("scale", "small")) != (study, scale):
            continue
        match row["kind"]:
            case "arm" | "finetune":
                found.arms.setdefault(row["arm"], {})[row["seed"]] = row
            case "comparison":
                found.claims[row["better"], row["than"], row["metric"]] = row
            case "seed":
                found.seconds[row["seed"]] = row["cpu_seconds"]
            case "constant":
                found = found._replace(constant=row)
            case "map":
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


def overview(results: Path) -> str:
    """Which studies have been run, and the signs of all claims of the paper."""
    names = study_names()
    all_of = {(name, scale): _results(results, name, scale) for name in names for scale in SCALES}
    lines, signs = [], []
    for name in names:
        study = read_toml(FILES / f"{name}.toml")
        run = [
            f"seeds {_listed(sorted({seed for rows in found.arms.values() for seed in rows}))}"
            if (found := all_of[name, scale]).arms
            else "not run yet" if scale in study["scales"] else "-"
            for scale in SCALES
        ]  # fmt: skip
        lines.append((f"[{study['title']}](#{_anchor(study['title'])})", study["source"], *run))
        for scale in SCALES:
            found = all_of[name, scale]
            compared = [*_claims(study, found), *_map_claims(study, found)]
            signs += [(study["source"], scale, *line) for line in compared if line[-2] != "-"]
    waiting = []
    for place, scale in enumerate(SCALES, 2):
        could = [line for line in lines if line[place] != "-"]
        missing = [line for line in could if line[place] == "not run yet"]
        if missing:
            named = "; ".join(line[1] if line[1].startswith(("Figure", "Table")) else line[0] for line in missing)
            waiting.append(f"At scale {scale}: {'everything' if missing == could else named}.")
    said = f"**Not run yet.** {' '.join(waiting)}\n\n" if waiting else ""
    if signs:
        same = sum(line[-2] == "yes" for line in signs)
        said += f"{same} of the {len(signs)} claims of the paper that were measured have the paper's sign.\n\n"
    table = markdown(("study", "source", *(f"scale {scale}" for scale in SCALES)), lines)
    if not signs:
        return f"{said}{table}"
    heads = ("source", "scale", *_CLAIM_HEADS)
    keep = [heads.index(head) for head in ("source", "scale", "", "metric", *_CLAIM_HEADS[4:])]
    chosen = [[line[column] for column in keep] for line in signs]
    return f"{said}{table}\n{markdown([heads[column] for column in keep], chosen)}"


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
    found = {scale: _results(results, name, scale) for scale in SCALES}
    parts = [f"Source: {study['source']}. File: `configs/studies/{name}.toml`. {study.get('note', '')}".strip() + "\n"]
    parts += [f"{_what_was_run(scale, found[scale])}\n" for scale in SCALES if scale in study["scales"]]
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
            picture = f"![Improvement over rotations and shifts](images/study_equivariance_{scale}.png)"
            parts.append(f"Maps at scale {scale}:\n\n{markdown(_CLAIM_HEADS, lines)}\n{picture}\n")
    return "\n".join(filter(None, parts))


def _what_was_run(scale: str, found: _Results) -> str:
    rows = [row for by_seed in found.arms.values() for row in by_seed.values()]
    if not rows:
        return f"Scale {scale}: **not run yet**."
    last = max(rows, key=lambda row: int(row["place"].split()[-1]))
    minutes = [seconds / 60 for seconds in found.seconds.values()]
    took = f", {_span(minutes)} minutes of CPU time each, pre-training included" if minutes else ""
    seeds = sorted({row["seed"] for row in rows})
    return f"Scale {scale}: {len(seeds)} seeds{took}. Last row: {measured_on(last)}."


def _arms(study: Row, found: dict[str, _Results]) -> str:
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
    heads = ("mean and range over seeds", *(f"{metric_in_words(metric)}, {column}" for metric, column in columns))
    return markdown(heads, kept)


_CLAIM_HEADS: Final = (*COMPARISON_HEADS[:5], "better by", "published", "the paper's sign", "interval without zero")


def _claims(study: Row, found: _Results) -> list[tuple[str, ...]]:
    """A line for each comparison that was measured, in the order of the file."""
    lines = []
    for claim in study.get("compare", []):
        row = found.claims.get((claim["better"], claim["than"], claim.get("metric", "pa_epe_cm")))
        if row is None:
            continue
        higher = METRICS[row["metric"]].higher_is_better
        whole = found.mean(row["better"] if higher else row["than"], row["metric"], row["seeds"])
        gain = row["mean"] if higher else -row["mean"]
        percent = f"{claim['percent']:g} %" if "percent" in claim else "-"
        sign = ("yes" if gain > 0 else "**no**") if claim.get("claimed", True) else "-"
        clear = "yes" if row["low"] > 0 or row["high"] < 0 else "no"
        lines.append((*comparison_cells(row)[:5], f"{100 * gain / whole:+.1f} %", percent, sign, clear))
    return lines


def _order(study: Row, found: _Results) -> str:
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
            said.append(f"{of} in {metric_in_words(metric)}: {_listed(names)}.")
    return " ".join(said)


def improvement(found: _Results, better: str, than: str, table: str) -> npt.NDArray[np.float64]:
    """(than - better) / than in percent at each place of the maps, for each seed; NaN where nothing is moved."""
    seeds = sorted(found.maps[better].keys() & found.maps[than].keys())
    ours, theirs = (np.array([found.maps[arm][seed][table] for seed in seeds], float) for arm in (better, than))
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(theirs > 1e-6, 100 * (theirs - ours) / theirs, np.nan)


def _map_claims(study: Row, found: _Results) -> list[tuple[str, ...]]:
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


def write_pictures(results: Path, images: Path) -> Iterator[str]:
    """Draw the comparisons of the first study and the maps. Yields what was drawn."""
    images.mkdir(parents=True, exist_ok=True)
    if claims := list(_results(results, "hands", "small").claims.values()):
        picture = images / "experiment_hands.png"
        save_comparisons(claims, picture)
        yield f"{picture}: {len(claims)} comparisons"
    for name in study_names():
        maps = read_toml(FILES / f"{name}.toml").get("maps")
        for scale in SCALES:
            found = _results(results, name, scale)
            if maps is not None and found.maps:
                picture = images / f"study_equivariance_{scale}.png"
                save_maps(found, maps["better"], maps["than"], picture)
                yield f"{picture}: maps of {name}"


def save_maps(found: Any, better: str, than: str, out: Path) -> None:
    """Draw the improvement over the angles, for each seed and their mean, and over the shifts, as a mean over seeds."""
    rotations, shifts = (improvement(found, better, than, table) for table in ("rotation_error_px", "shift_error_px"))
    row = next(iter(found.maps[better].values()))
    figure = Figure(figsize=(8.5, 3.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    left.axhline(0, color="black", linewidth=0.8)
    for values in rotations:
        left.plot(row["rotation_deg"], values, color=_SEED, linewidth=1)
    left.plot(row["rotation_deg"], rotations.mean(axis=0), color=_BETTER, linewidth=2)
    left.set_xlabel("rotation, degrees")
    left.set_ylabel(f"improvement of {better} over {than}, %")
    mean = shifts.mean(axis=0)
    largest = np.nanmax(np.abs(mean))
    shown = right.pcolormesh(row["shift_px"], row["shift_px"], mean, cmap="RdYlGn", vmin=-largest, vmax=largest)
    right.set_xlabel("shift in x, px of 128")
    right.set_ylabel("shift in y, px of 128")
    right.invert_yaxis()
    figure.colorbar(shown, ax=right, label="improvement, %")
    save_figure(out, figure, dpi=120)


def comparison_cells(row: Row) -> tuple[str, ...]:
    """The cells of a row of kind "comparison", in the order of `COMPARISON_HEADS`."""
    return (
        f"{row['better']} minus {row['than']}",
        metric_in_words(row["metric"]),
        ", ".join(f"{difference:+.3f}" for difference in row["differences"]),
        f"{row['mean']:+.3f}",
        f"{row['low']:+.3f} to {row['high']:+.3f}",
        "yes" if row["holds"] else "no",
    )


def metric_in_words(name: str) -> str:
    """Title and unit of a metric."""
    return ", ".join(filter(None, (METRICS[name].title, METRICS[name].unit)))


def save_comparisons(rows: Sequence[Row], out: Path) -> None:
    """Draw rows of the kind "comparison": the seeds' differences, their mean and its interval.

    Each comparison has its own panel, since the units differ.
    """
    figure = Figure(figsize=(7.5, 0.55 + 0.85 * len(rows)), layout="constrained")
    for row, axes in zip(rows, figure.subplots(len(rows), squeeze=False)[:, 0], strict=True):
        colour = _BETTER if row["holds"] else _WORSE
        axes.axvline(0, color="black", linewidth=0.8)
        axes.plot([row["low"], row["high"]], [0, 0], color=colour, linewidth=2, solid_capstyle="butt")
        axes.plot(row["differences"], [0.35] * len(row["differences"]), "o", color=_SEED, markersize=4)
        axes.plot(row["mean"], 0, "D", color=colour, markersize=6)
        axes.set_ylim(-0.6, 0.8)
        axes.set_yticks([])
        axes.spines[["left", "top", "right"]].set_visible(False)
        axes.tick_params(labelsize=8)
        axes.set_title(f"{row['better']} minus {row['than']}: {metric_in_words(row['metric'])}", fontsize=9, loc="left")
    figure.supxlabel("difference; dots: each seed, diamond and bar: mean and 95 % interval", fontsize=8)
    save_figure(out, figure, dpi=120)


def _span(values: Sequence[float]) -> str:
    return " to ".join(dict.fromkeys(f"{value:.1f}" for value in (min(values), max(values))))


def _listed(values: Iterable[object]) -> str:
    return ", ".join(map(str, values))


def _anchor(title: str) -> str:
    """The link to a heading, as GitHub makes it."""
    kept = "".join(letter for letter in title.lower() if letter.isalnum() or letter in " -_")
    return kept.replace(" ", "-")
