"""Runs a study, records its rows and prints its tables; or prints the commands of its runs, for a cluster."""

from __future__ import annotations

import fcntl
import json
import math
import os
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from peclr_dali.bench.options import record_option
from peclr_dali.bench.rows import append, describe_machine, read_rows
from peclr_dali.bench.studies.compare import Row, compare, tables_of
from peclr_dali.bench.studies.measure import measure_constants, measured_errors, measured_maps
from peclr_dali.bench.studies.scales import Dataset
from peclr_dali.bench.studies.study import ScaleName, Studies, Study
from peclr_dali.errors import UserError
from peclr_dali.synthetic import make_dataset
from peclr_dali.train.commands.options import SEED
from peclr_dali.train.distributed.interrupt import Interrupted
from peclr_dali.train.finetune import finetune
from peclr_dali.train.pose.metrics import METRICS, metric_of
from peclr_dali.train.pretrain import pretrain
from peclr_dali.train.read_out import fit_read_out
from peclr_dali.train.runs.folder import RunFolder
from peclr_dali.train.runs.log import configure_logging, progress_bar


def run_study(study: Study, record: Path | None = None) -> list[Row]:
    """Run all arms that have not finished, seed by seed, measure and compare them. Returns the rows.

    Interrupted runs are continued, so a second call finishes an interrupted study.

    Args:
        study: the study at one scale.
        record: file to which rows are appended. A row that equals the newest one about the same is not repeated.
    """
    for dataset in study.datasets():
        if dataset.render is not None:
            _render(dataset)
    rows: list[Row] = []

    def tell(row: Row) -> None:
        rows.append(row)
        if record is not None:
            _append(record, {"bench": "experiment", "study": study.name, "scale": study.folder.name, **row})

    measured_on = {study.measured_on(name).root: study.held_out(name) for name in study.measured}
    for root, keys in measured_on.items():  # before hours of training, in case that images are missing
        tell({"kind": "constant", "on": root, "constants": measure_constants(keys)})
    done = set[int]()
    for seed in study.seeds:
        if (start := study.start_seed(seed)) not in done:
            done.add(start)
            for name in study.pretrain:
                tell(pretrained(study, name, start))
        for name in study.measured:
            tell(read_out(study, name, seed))
        for name in study.maps or ():
            errors = {key: array.tolist() for key, array in measured_maps(study, seed, name).items()}
            tell({"kind": "map", "seed": seed, "arm": name, **errors})
    for claim in study.compare:
        tell(compare(study, claim))
    return rows


def pretrained(study: Study, name: str, seed: int) -> Row:
    """Pre-train an arm, unless that is done. Its row has the linear probe during the run, in pixels of 224."""
    config, keys = study.pretraining(name, seed)
    pretrain(config, "auto")
    row: Row = {"kind": "pretrain", "seed": seed, "arm": name, "set": keys}
    if probes := RunFolder(Path(config.run.out), keep=1).read_validations():
        row["probe_step"] = [probe["step"] for probe in probes]
        row["probe_epe_px"] = [probe["epe_px_of_224"] for probe in probes]
        row["probe_constant_epe_px"] = probes[-1].get("constant_epe_px_of_224")
    return row


def read_out(study: Study, name: str, seed: int) -> Row:
    """Fine-tune or read out an arm, unless that is done or it has no network of its own. Its row has the errors."""
    arm = study.measured[name]
    row: Row = {"kind": "arm", "seed": seed, "arm": name, "by": arm.by, "on": study.measured_on(name).root}
    if arm.network is None:
        config, row["set"] = study.measurement(name, seed)
        (finetune if arm.by == "finetune" else fit_read_out)(config, "auto")
    row |= {"true_root": True} if arm.by == "probe" else {}
    errors = measured_errors(study, seed, name)
    return row | {metric: metric_of(table) for metric, table in errors.items() if metric in METRICS}


def _render(dataset: Dataset) -> None:
    """Render a dataset, unless it is finished. A second process waits for the first."""
    root = Path(dataset.root).absolute()
    root.parent.mkdir(parents=True, exist_ok=True)
    with root.with_name(f"{root.name}.lock").open("a") as lock, progress_bar(f"rendering {dataset.root}") as progress:
        fcntl.flock(lock, fcntl.LOCK_EX)
        options: dict[str, Any] = dict(dataset.render or {})
        make_dataset(root, progress=progress, **options)


_SUBJECT = ("study", "scale", "kind", "seed", "arm", "better", "than", "metric", "on")
"""Keys that say what a row is about. Of rows with the same values, the newest counts."""


def _append(record: Path, row: Row) -> None:
    """Append a row to a file, unless it equals the newest one about the same, or is a comparison without interval."""
    row = json.loads(json.dumps(row))  # as reading it back gives it
    if not math.isfinite(row.get("low", 0)):
        return
    about = [row.get(key) for key in _SUBJECT]
    rows = read_rows(record) if record.exists() else []
    same = [old for old in rows if [old.get(key) for key in _SUBJECT] == about]
    newest = {key: value for key, value in (same[-1] if same else {}).items() if key != "machine"}
    if row != newest:
        append(record, row | {"machine": describe_machine()})


def commands_of(study: Study) -> Iterator[str]:
    """Shell commands of a study's runs, each after what it needs."""

    def line(*words: object, files: Sequence[str] = (), keys: Sequence[str] = ()) -> str:
        options = [("-c", file) for file in files] + [("--set", key) for key in keys]
        return shlex.join(map(str, [*words, *(word for option in options for word in option), "--resume", "auto"]))

    for seed in dict.fromkeys(map(study.start_seed, study.seeds)):
        for name in study.pretrain:
            config, keys = study.pretraining(name, seed)
            processes = min(study.at.processes, config.train.batch // config.train.micro_batch)
            launcher = ("torchrun", f"--nproc-per-node={processes}") if processes > 1 else ("python",)
            yield line(*launcher, "-m", "peclr_dali", "pretrain", files=study.at.pretrain_files, keys=keys)
    for seed in study.seeds:
        for name, arm in study.measured.items():
            if arm.network is None:
                _, keys = study.measurement(name, seed)
                yield line("python", "-m", "peclr_dali", arm.by, files=study.at.measured_files, keys=keys)


def main(studies: Studies) -> None:
    """The command of a file of studies."""
    names = sorted({study.name for of_scale in studies.values() for study in of_scale})

    @click.command(help=f"Run studies: {', '.join(names)}. An interrupted study continues where it stopped.")
    @click.option("--scale", type=click.Choice(["small", "paper"]), default="small", show_default=True, help=_SCALE)
    @click.option("--study", "only", type=click.Choice(names), multiple=True, help="Run only this one; repeatable.")
    @click.option("--arm", "arms", multiple=True, metavar="NAME", help="Run only this arm; repeatable.")
    @click.option("--seeds", metavar="0,1,...", callback=_numbers, help="Run these; other processes can run others.")
    @click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Change one key of every run.")
    @click.option("-c", "files", multiple=True, metavar="FILE", help="A file over those of pre-training: cards/h100.")
    @click.option("--list", "listed", is_flag=True, help="Print the commands of all runs, for a cluster; run nothing.")
    @record_option
    def command(
        scale: ScaleName, only: Sequence[str], arms: Sequence[str], seeds: Sequence[int], **options: Any
    ) -> None:
        chosen = [study for study in studies.get(scale, ()) if not only or study.name in only]
        for study in [study.only(arms) if arms else study for study in chosen]:
            _run(replace(study, seeds=seeds or study.seeds), **options)

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


_SCALE = "small: rendered hands and minutes on a CPU for each run; paper: the datasets and settings of the paper."


def _numbers(context: click.Context, option: click.Parameter, text: str | None) -> list[int]:
    return [SEED(one, option, context) for one in (text or "").split(",") if one]


def _run(study: Study, overrides: Sequence[str], files: Sequence[str], listed: bool, record: Path | None) -> None:
    at = replace(
        study.at,
        pretrain=(*study.at.pretrain, *overrides),
        measured=(*study.at.measured, *overrides),
        pretrain_files=(*study.at.pretrain_files, *files),
    )
    study = replace(study, at=at)
    if listed:
        click.echo("\n".join(commands_of(study)))
    else:
        click.echo(f"\n{study.name}, scale {study.folder.name}\n\n{tables_of(study, run_study(study, record))}")
