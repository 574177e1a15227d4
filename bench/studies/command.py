"""The command of a file of studies."""

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import click
import numpy as np

from peclr_dali.bench.commands import record_option
from peclr_dali.bench.rows import markdown
from peclr_dali.bench.studies.study import Row, Scale, Study
from peclr_dali.errors import UserError
from peclr_dali.train.commands.options import SEED, is_main_rank
from peclr_dali.train.distributed.interrupt import Interrupted
from peclr_dali.train.pose.metrics import METRICS
from peclr_dali.train.runs.log import configure_logging

Studies = Mapping[str, Mapping[Callable[[Study], None], Scale]]
"""For "small" and "paper", the functions of the studies, each with what its runs share."""


def main(studies: Studies) -> None:
    """Run the command."""
    scales = "small: rendered hands and minutes on a CPU for each run; paper: the paper's datasets and settings."
    names = click.Choice(sorted({function.__name__ for chosen in studies.values() for function in chosen}))

    @click.command(help=f"Run studies: {', '.join(names.choices)}. An interrupted study continues where it stopped.")
    @click.option("--scale", type=click.Choice([*studies]), default=next(iter(studies)), show_default=True, help=scales)
    @click.option("--study", "chosen", type=names, multiple=True, help="Run only this one; repeatable.")
    @click.option("--arm", "arms", multiple=True, metavar="NAME", help="Run only this arm; repeatable.")
    @click.option("--seeds", metavar="0,1,...", callback=_numbers, help="Run these; other processes can run others.")
    @click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Change one key of every run.")
    @click.option("-c", "files", multiple=True, type=Path, help="A file over those of pre-training: cards/h100.")
    @record_option
    def command(
        scale: str, chosen: Sequence[str], arms: Sequence[str], seeds: Sequence[int], overrides: tuple[str, ...],
        files: tuple[Path, ...], record: Path | None,
    ) -> None:  # fmt: skip
        plans = {}
        for function, shared in studies[scale].items():
            if function.__name__ in (chosen or names.choices):
                changed = replace(shared, pretrain_files=(*shared.pretrain_files, *files), overrides=overrides)
                record_here = record if is_main_rank() else None
                plans[function] = Study(function.__name__, changed, seeds, arms, record_here)
                function(plans[function])  # only composes configurations: a mistake ends the command before any work
        known = [arm for study in plans.values() for arm in study.arms]
        if unknown := [arm for arm in arms if arm not in known]:
            raise click.BadParameter(f"there is no arm {unknown[0]!r}; expected one of {', '.join(known)}")
        for function, study in plans.items():
            study.begin()
            function(study)
            if study.measured:
                click.echo(f"\n{study.name}, scale {scale}\n\n{tables_of(study.rows)}")

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
    return [SEED(number, option, context) for number in (text or "").split(",") if number]


def tables_of(rows: Sequence[Row]) -> str:
    """The tables of a study in Markdown, from its rows: errors of constants and arms, and comparisons."""
    arms: dict[str, list[Row]] = {}
    for row in rows:
        if row["kind"] == "constant":
            arms |= {f"{name}, {row['on']}": [errors] for name, errors in row["constants"].items()}
        elif row["kind"] in ("arm", "map"):
            arms.setdefault(row["arm"], []).append(row)
    titles = {name: metric.title_and_unit for name, metric in METRICS.items()}
    titles |= {"rotation_error_px": "rotated, px of 128", "shift_error_px": "shifted, px of 128"}  # means of the maps
    metrics = [metric for metric in titles if any(metric in row for row in rows)]
    heads = ["mean and range over seeds; published", *(titles[metric] for metric in metrics)]
    errors = markdown(heads, [[arm, *(_cell(arms[arm], metric) for metric in metrics)] for arm in arms])
    heads = ["", "metric", "mean", "95 % interval", "better by", "published, %", "better than constants"]
    compared = [
        [
            f"{row['better']} minus {row['than']}", titles[row["metric"]], f"{row['mean']:+.3f}",
            f"{row['low']:+.3f} to {row['high']:+.3f}", f"{row['better_by_percent']:+.1f} %",
            f"{row['published_percent'] or '-'}", {True: "yes", False: "no", None: "-"}[row["beats_constants"]],
        ]
        for row in rows if row["kind"] == "comparison"
    ]  # fmt: skip
    return f"{errors}\n{markdown(heads, compared)}"


def _cell(rows: Sequence[Row], metric: str) -> str:
    """Mean and range over the rows of an arm, and the published figure."""
    values = [float(np.mean(row[metric])) for row in rows if metric in row]
    published = rows[0].get("published", {}).get(metric)
    text = f"{np.mean(values):.3f} ({min(values):.3f} to {max(values):.3f})" if values else "-"
    return text if published is None else f"{text}; {published:g}"
