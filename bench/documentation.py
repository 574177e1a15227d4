"""The tables of docs/performance.md, docs/cluster.md and docs/experiments.md, made from the rows of bench/results/.

So no figure stands there without one. A table stands between `<!-- rows: NAME -->` and `<!-- end rows -->`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from bench.capacity import GPUS, Model, costs_of_row, need
from bench.experiment_report import UNITS
from bench.gpu.claims import said
from bench.report import read_rows
from errors import UserError

Row = Mapping[str, Any]

PAGES: Final = ("performance.md", "cluster.md", "experiments.md")

_BLOCK: Final = re.compile(r"(<!-- rows: ([a-z-]+) -->\n).*?(<!-- end rows -->)", re.DOTALL)
_MODELS: Final[tuple[Model, ...]] = ("ResNet-50", "ResNet-152")


def write_tables(text: str, results: Path) -> str:
    """A page with its tables made anew from the rows of a folder.

    Raises:
        UserError: a table has a name that nothing makes.
    """

    def made(block: re.Match[str]) -> str:
        if block[2] not in _TABLES:
            raise UserError(f"<!-- rows: {block[2]} -->: known are {', '.join(_TABLES)}")
        return f"{block[1]}\n{_TABLES[block[2]](results)}\n{block[3]}"

    return _BLOCK.sub(made, text)


def _loader(sources: str, part: str) -> Callable[[Path], str]:
    def table(results: Path) -> str:
        row = _last(
            results / "loader.jsonl",
            lambda row: _on_cpu(row) and row.get("sources", "small") == sources and part in row,
        )
        if row is None:
            return "No row yet.\n"
        lines = [
            (
                entry["name"],
                f"{entry['images_per_s']:.0f}",
                f"{entry['interval'][0]:.0f} to {entry['interval'][1]:.0f}",
                f"{entry['cpu_ms_per_image']:.3f}",
                _ratio(entry.get("ours_is")),
            )
            for entry in row[part]
        ]
        heads = ("", "images/s", "95 % interval", "CPU ms per image", "this loader is")
        said = f"\n{row['verdict']}\n" if part == "loaders" and "verdict" in row else ""
        return f"{_measured_on(row)}\n\n{_markdown(heads, lines)}{said}"

    return table


def _train(results: Path) -> str:
    row = _last(results / "train.jsonl", lambda row: _on_cpu(row) and row["bench"] == "train")
    if row is None:
        return "No row yet.\n"
    encoder, geometry = row["config"]["encoder"], row["config"]["geometry"]
    lines = [
        (
            one["precision"],
            f"{one['step_s'][0]:.3f} ({one['step_s'][1]:.3f} to {one['step_s'][2]:.3f})",
            f"{one['images_per_s']['cached']['mean']:.1f}",
            f"{one['images_per_s']['loaded']['mean']:.1f}",
            f"{one['waited_share']:.2%}",
            f"{one['optimizer_share']:.1%}",
            f"{one['model_flop_per_s'] / 1e12:.3f}",
            f"{one['peak_memory_mib']}",
            _over(one, "plain"),
            _over(one, "averaged"),
        )
        for one in row["precisions"]
    ]
    heads = (
        "precision", "step s", "images/s at hand", "images/s with the loader", "waited", "optimiser",
        "model TFLOP/s", "peak MiB", "over the plain step", "over averaged small batches",
    )  # fmt: skip
    first = row["precisions"][0]
    said = (
        f"{_measured_on(row)}, {encoder['name']} at {geometry['side_px']} pixels, batches of {first['batch']} in "
        f"micro-batches of {first['micro_batch']}."
    )
    return f"{said}\n\n{_markdown(heads, lines)}"


def _soak(results: Path) -> str:
    row = _last(results / "soak.jsonl", lambda row: row["bench"] == "soak")
    if row is None:
        return "No row yet.\n"
    first, last = row["history"][0], row["history"][-1]
    return (
        f"{_measured_on(row)}: {row['seconds'] / 60:.0f} minutes, {row['images']} images, memory "
        f"{row['memory_growth']:+.2%} from the first minute to the end ({last[1]:.0f} MiB), open files "
        f"{first[2]} at the beginning and {last[2]} at the end.\n"
    )


def _gpu(results: Path) -> str:
    """The claims of the newest run of each stage of `bench-gpu`, as they stand in its row."""
    stages = {row["stage"]: row for row in _rows(results / "gpu.jsonl") if not row["dry_run"]}
    if not stages:
        return "No row yet: none of this has been measured.\n"
    lines = [
        (row["stage"], claim["what"], claim["found"], claim["wanted"], said(claim["holds"]), row["place"])
        for row in stages.values()
        for claim in row["claims"]
    ]
    machines = "\n".join(dict.fromkeys(f"- {_machine(row)}" for row in stages.values()))
    return f"{machines}\n\n{_markdown(('stage', 'what', 'found', 'wanted', 'holds', 'row'), lines)}"


def _ideas(results: Path) -> str:
    row = _last(results / "gpu.jsonl", lambda row: row["stage"] == "ideas" and not row["dry_run"] and "ideas" in row)
    if row is None:
        return "No row yet.\n"
    lines = [(idea["idea"], idea["prediction"], idea["outcome"]) for idea in row["ideas"]]
    return f"{_measured_on(row)}\n\n{_markdown(('idea', 'prediction', 'outcome'), lines)}"


def _capacity(results: Path) -> str:
    row = _last(
        results / "loader.jsonl", lambda row: _on_cpu(row) and row.get("sources") == "small" and "stages" in row
    )
    if row is None:
        return "No row yet.\n"
    costs = costs_of_row(row)
    lines = [
        (
            f"{gpu.count} x {gpu.name}",
            model,
            str(side_px),
            f"{found.images_per_s:.0f}",
            f"{found.cores_cpu:.1f}",
            f"{found.cores_read:.2f}",
            f"{found.storage_mib_per_s:.0f}",
        )
        for gpu in GPUS
        for model in _MODELS
        for side_px in (128, 224)
        for found in [need(costs, gpu, model, side_px)]
    ]
    heads = (
        "node", "model", "view px", "images/s, assumed", "cores, all on CPUs", "cores, reading only", "storage MiB/s",
    )  # fmt: skip
    sources = "".join(f"- {gpu.name}: {gpu.resnet50_images_per_s:.0f} images/s, {gpu.source}.\n" for gpu in GPUS)
    said = (
        f"Measured costs of an image ({_measured_on(row)}), in core-milliseconds: reading {costs.read_s * 1e3:.3f}, "
        f"decoding {costs.decode_s * 1e3:.3f}, "
        f"views {costs.views_s * 1e3:.3f}, handing over {costs.hand_over_s * 1e3:.3f}; a file has "
        f"{costs.bytes_per_image / 1024:.1f} KiB. Training ResNet-50 at 224 pixels, one card:"
    )
    return f"{said}\n\n{sources}\n{_markdown(heads, lines)}"


def comparisons(results: Path) -> list[Row]:
    """The newest row of each comparison of the experiments."""
    rows = [row for row in _rows(results / "experiments.jsonl") if row["kind"] == "comparison"]
    return list({(row["better"], row["than"], row["metric"]): row for row in rows}.values())


def _experiment(results: Path) -> str:
    rows, claims = list(_rows(results / "experiments.jsonl")), comparisons(results)
    if not claims:
        return "No row yet.\n"
    seeds = claims[-1]["seeds"]

    def latest(kind: str) -> dict[tuple[Any, ...], Row]:
        return {(row.get("arm"), row.get("seed")): row for row in rows if row["kind"] == kind}

    arms, took, constant = latest("finetune"), latest("seed"), latest("constant")[None, None]
    compared = [
        (
            f"{row['better']} minus {row['than']}",
            UNITS[row["metric"]],
            ", ".join(f"{difference:+.3f}" for difference in row["differences"]),
            f"{row['mean']:+.3f}",
            f"{row['low']:+.3f} to {row['high']:+.3f}",
            "yes" if row["holds"] else "no",
        )
        for row in claims
    ]
    metrics = ("pa_epe_cm", "epe_cm", "epe_px")
    names = dict.fromkeys(name for name, _ in arms)
    means = [
        (name, *(f"{sum(arms[name, seed][metric] for seed in seeds) / len(seeds):.3f}" for metric in metrics))
        for name in names
    ]
    minutes = [[took[None, seed][key] / 60 for seed in seeds] for key in ("seconds", "cpu_seconds")]
    heads = ("", "metric", "each seed", "mean", "95 % interval", "holds")
    return (
        f"{_measured_on(claims[-1])}; {len(seeds)} seeds, each {_span(minutes[1])} minutes of CPU time (the wall times "
        f"of its runs add up to {_span(minutes[0])} minutes).\n\n"
        f"{_markdown(heads, compared)}\n"
        f"{_markdown(('mean over seeds', *(UNITS[metric] for metric in metrics)), means)}\n"
        f"Without looking at the picture, the mean pose has a PA-EPE of {constant['mean_pose_pa_epe_cm']:.3f} cm, and "
        f"one rigid hand {constant['rigid_hand_pa_epe_cm']:.3f} cm.\n"
    )


def _span(values: Sequence[float]) -> str:
    return " to ".join(dict.fromkeys(f"{value:.1f}" for value in (min(values), max(values))))


def _scaling_error(results: Path) -> str:
    rows = {row["measured"]["ranks"]: row for row in _rows(results / "scaling.jsonl")}  # the last of each number
    if not rows:
        return "No row yet.\n"
    lines = []
    for ranks, row in sorted(rows.items()):
        measured, link, errors = row["measured"], row["here"]["inside"], row["errors_of_sums"]
        lines.append(
            (
                str(ranks),
                f"{link['latency_s'] * 1e6:.0f}" if errors else "-",
                f"{link['bytes_per_s'] / 1e9:.2f}" if errors else "-",
                f"{min(errors):+.0%} to {max(errors):+.0%}" if errors else "-",
                f"{measured['micro_batch_s']:.3f}",
                f"{measured['fixed_s']:.3f}",
                f"{measured['step_s']:.3f}",
                f"{row['step_s_predicted_here']:.3f}",
                f"{row['error_here']:+.0%}",
                f"{measured['load']:.1f}",
                row["place"],
            )
        )
    heads = (
        "ranks", "us per hop", "GB/s", "error of the sums, 16 B to 16 MiB", "t_micro s", "t_fixed s",
        "step s, measured", "step s, model", "error", "load before", "row",
    )  # fmt: skip
    work = row["work"]
    said = (
        f"{_machine(row)}; batches of {work['batch']} in micro-batches of {work['micro_batch']}, {work['parameters']} "
        f"parameters"
    )
    return f"{said}.\n\n{_markdown(heads, lines)}"


def _scaling_projection(results: Path) -> str:
    row = _last(results / "scaling.jsonl", lambda row: row["cluster"] != row["here"])
    if row is None:
        return "No row yet.\n"
    lines = [
        (
            str(entry["nodes"]),
            str(entry["ranks"]),
            f"{entry['step_s']:.3f}",
            f"{entry['efficiency']:.0%}",
            entry["limit"],
        )
        for entry in {entry["ranks"]: entry for entry in row["projection"]}.values()  # more nodes have no more work
    ]
    cluster, work = row["cluster"], row["work"]
    said = (
        f"PROJECTION, not a measurement ({row['place']}): {cluster['gpus_per_node']} GPUs a node, "
        f"{cluster['inside']['bytes_per_s'] / 1e9:g} GB/s inside and {cluster['between']['bytes_per_s'] / 1e9:g} GB/s "
        f"between nodes, {cluster['micro_batch_s']:g} s for a micro-batch; batches of {work['batch']} in micro-batches "
        f"of {work['micro_batch']}, {work['parameters']} parameters"
    )
    return f"{said}.\n\n{_markdown(('nodes', 'ranks', 'step s', 'efficiency', 'limited first by'), lines)}"


_TABLES: Final[Mapping[str, Callable[[Path], str]]] = {
    "loaders": _loader("small", "loaders"),
    "stages": _loader("small", "stages"),
    "loaders-large": _loader("large", "loaders"),
    "stages-large": _loader("large", "stages"),
    "train": _train,
    "soak": _soak,
    "gpu": _gpu,
    "gpu-ideas": _ideas,
    "capacity": _capacity,
    "experiment": _experiment,
    "scaling-error": _scaling_error,
    "scaling-projection": _scaling_projection,
}


def _on_cpu(row: Row) -> bool:
    return bool(row["machine"]["gpu"] == "none")


def _last(file: Path, wanted: Callable[[Row], bool]) -> Row | None:
    rows = [row for row in _rows(file) if wanted(row)]
    return rows[-1] if rows else None


def _rows(file: Path) -> Iterator[Row]:
    for number, row in enumerate(read_rows(file) if file.exists() else [], 1):
        yield {**row, "place": f"`{file.name}`, row {number}"}


def _measured_on(row: Row) -> str:
    return f"{row['place']}: {_machine(row)}"


def _machine(row: Row) -> str:
    machine = row["machine"]
    cores = row.get("settings", {}).get("cores", machine["cores"])
    where = machine["gpu"] if machine["gpu"] != "none" else "no GPU"
    return f"{cores} cores of an {machine['cpu']}, {where}, {machine['date']}, commit {machine['commit']}"


def _ratio(ratio: Sequence[float] | None) -> str:
    return "-" if ratio is None else f"{ratio[0]:.2f} x ({ratio[1]:.2f} to {ratio[2]:.2f})"


def _over(one: Row, other: str) -> str:
    rates = one["images_per_s"]
    return f"{rates[other]['mean'] / rates['cached']['mean']:.2f} x" if other in rates else "not measured"


def _markdown(heads: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    rows = [heads, ["---"] * len(heads), *lines]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)
