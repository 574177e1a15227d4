"""Runs a study, records its rows and prints its tables; or prints the commands of its runs, for a cluster."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import click
import numpy as np
from filelock import FileLock

from peclr_dali.bench.commands import record_option
from peclr_dali.bench.rows import append, describe_machine, markdown, read_rows
from peclr_dali.bench.studies.measure import Row, compare, measure_constants, measured
from peclr_dali.bench.studies.study import Dataset, ScaleName, Studies, Study
from peclr_dali.errors import UserError
from peclr_dali.synthetic.dataset import make_dataset
from peclr_dali.train.commands.options import SEED
from peclr_dali.train.distributed.interrupt import Interrupted
from peclr_dali.train.pose.metrics import METRICS, metric_of
from peclr_dali.train.runs.folder import RunFolder
from peclr_dali.train.runs.log import configure_logging, progress_bar


def run_study(study: Study) -> Iterator[Row]:
    """Run all arms that have not finished, measure and compare them. Yields a row of each, when it is known.

    Interrupted runs are continued, so a second call finishes an interrupted study.
    """
    for arm in (*study.pretrain.values(), *study.measured.values()):
        for dataset in (*arm.data, arm.on or study.at.data):
            _render(dataset)
    # Before hours of training, in case that images are missing.
    for root, keys in {study.measured_on(name).root: study.held_out(name) for name in study.measured}.items():
        yield {"kind": "constant", "on": root, "constants": measure_constants(*keys)}
    for name, seed, run in study.runs():
        run.train()
        row: Row = {"kind": "arm", "seed": seed, "arm": name, "set": run.keys}
        if run.command == "pretrain":
            row["kind"] = "pretrain"
            if probes := RunFolder(run.out, keep=1).read_validations():  # the linear probe, in pixels of 224
                row["probe_step"] = [probe["step"] for probe in probes]
                row["probe_epe_px"] = [probe["epe_px_of_224"] for probe in probes]
                row["probe_constant_epe_px"] = probes[-1].get("constant_epe_px_of_224")
            yield row
            continue
        row["on"] = study.measured_on(name).root
        errors = {key: metric_of(table) for key, table in measured(study, seed, name).items() if key in METRICS}
        yield row | errors | {"published": study.measured[name].published}
        if study.maps:
            maps = {key: array.tolist() for key, array in measured(study, seed, name, "map").items()}
            yield {"kind": "map", "seed": seed, "arm": name, **maps}
    for claim in study.compare:
        yield compare(study, claim)


def _render(dataset: Dataset) -> None:
    """Render a dataset, unless it is finished or not rendered at all. A second process waits for the first."""
    if dataset.render is not None:
        root = Path(dataset.root)
        root.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{root}.lock"), progress_bar(f"rendering {root}") as progress:
            make_dataset(root, progress=progress, **dataset.render)


def tables_of(rows: Sequence[Row]) -> str:
    """The tables of a study in Markdown, from its rows: errors of arms and constants, and comparisons."""
    of_networks = [row for row in rows if row["kind"] in ("arm", "map")]
    of_constants = [
        {"arm": f"{name.replace('_', ' ')}, {row['on']}", **errors}
        for row in rows
        if row["kind"] == "constant"
        for name, errors in row["constants"].items()
    ]
    titles = {name: metric.title_and_unit for name, metric in METRICS.items()}
    titles |= {"rotation_error_px": "rotated, px of 128", "shift_error_px": "shifted, px of 128"}  # means of the maps
    metrics = [metric for metric in titles if any(metric in row for row in of_networks)]
    lines: dict[str, list[str]] = {row["arm"]: [] for row in (*of_networks, *of_constants)}
    for name, line in lines.items():
        seeds = [row for row in (*of_networks, *of_constants) if row["arm"] == name]
        for metric in metrics:
            values = [float(np.mean(row[metric])) for row in seeds if metric in row]
            text = f"{np.mean(values):.3f} ({min(values):.3f} to {max(values):.3f})" if values else "-"
            published = seeds[0].get("published", {}).get(metric)
            line.append(text if published is None else f"{text}; {published:g}")
    heads = ["mean and range over seeds; published", *(titles[metric] for metric in metrics)]
    tables = markdown(heads, ([name, *line] for name, line in lines.items()))
    compared = [
        [
            f"{row['better']} minus {row['than']}", titles[row["metric"]], f"{row['mean']:+.3f}",
            f"{row['low']:+.3f} to {row['high']:+.3f}", f"{row['better_by_percent']:+.1f} %",
            f"{row['published_percent'] or '-'}", {True: "yes", False: "no", None: "-"}[row["beats_constants"]],
        ]
        for row in rows if row["kind"] == "comparison"
    ]  # fmt: skip
    heads = ["", "metric", "mean", "95 % interval", "better by", "published, %", "better than constants"]
    return f"{tables}\n{markdown(heads, compared)}" if compared else tables


def main(studies: Studies) -> None:
    """The command of a file of studies."""
    scales = "small: rendered hands and minutes on a CPU for each run; paper: the paper's datasets and settings."
    names = click.Choice(sorted({study.name for of_scale in studies.values() for study in of_scale}))

    @click.command(help=f"Run studies: {', '.join(names.choices)}. An interrupted study continues where it stopped.")
    @click.option("--scale", type=click.Choice([*studies]), default=next(iter(studies)), show_default=True, help=scales)
    @click.option("--study", "only", type=names, multiple=True, help="Run only this one; repeatable.")
    @click.option("--arm", "arms", multiple=True, metavar="NAME", help="Run only this arm; repeatable.")
    @click.option("--seeds", metavar="0,1,...", callback=_numbers, help="Run these; other processes can run others.")
    @click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Change one key of every run.")
    @click.option("-c", "files", multiple=True, metavar="FILE", help="A file over those of pre-training: cards/h100.")
    @click.option("--list", "listed", is_flag=True, help="Print the commands of all runs, for a cluster; run nothing.")
    @record_option
    def command(
        scale: ScaleName, only: Sequence[str], arms: Sequence[str], seeds: Sequence[int], listed: bool,
        overrides: Sequence[str], files: Sequence[str], record: Path | None,
    ) -> None:  # fmt: skip
        chosen = [study for study in studies[scale] if study.name in (only or names.choices)]
        known = [name for study in chosen for name in study.measured]
        if unknown := [name for name in arms if name not in known]:
            raise UserError(f"there is no arm {unknown[0]!r}; expected one of {', '.join(known)}")
        for study in chosen:
            pretrain, measured = ([*keys, *overrides] for keys in (study.at.pretrain, study.at.measured))
            all_files = [*study.at.pretrain_files, *files]
            at = replace(study.at, pretrain=pretrain, measured=measured, pretrain_files=all_files)
            one = replace(study.only(arms or known), at=at, seeds=seeds or study.seeds)
            if listed:
                click.echo("\n".join(dict.fromkeys(run.shell_command(at.processes) for _, _, run in one.runs())))
            elif one.measured:
                click.echo(run_and_record(one, record))

    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")  # as for the other commands (docs/performance.md)
    configure_logging()
    try:
        command()
    except UserError as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(2)
    except Interrupted as stop:
        click.echo(f"{stop.where}; continue by running this command again", err=True)
        sys.exit(stop.exit_code)


def _numbers(context: click.Context, option: click.Parameter, text: str | None) -> list[int]:
    return [SEED(one, option, context) for one in (text or "").split(",") if one]


def run_and_record(study: Study, record: Path | None) -> str:
    """Run a study and give its tables. Rows that the file does not have yet are appended to it."""
    rows, scale = [], study.folder.name
    known = [row | {"machine": None} for row in read_rows(record)] if record is not None and record.exists() else []
    for row in run_study(study):
        rows.append(row)
        entry = json.loads(json.dumps({"bench": "experiment", "study": study.name, "scale": scale, **row}))
        is_new = entry | {"machine": None} not in known and math.isfinite(row.get("low", 0))  # not of one trial
        if record is not None and is_new:
            append(record, entry | {"machine": describe_machine()})
    return f"\n{study.name}, scale {scale}\n\n{tables_of(rows)}"
