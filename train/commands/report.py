"""The command report: one page about runs."""

from collections.abc import Sequence
from pathlib import Path

import click

from peclr_dali.train.commands.options import FILE, PATH, force_option, say
from peclr_dali.writing import require_new


@click.command()
@click.argument("runs", nargs=-1, type=PATH, metavar="[RUN]...")
@click.option("--out", default="report.html", show_default=True, type=FILE, help="File of the page.")
@click.option("--predictions", default=None, type=PATH, help="Folder with results of predict.")
@click.option("--title", default=None, help="Title of the page.")
@force_option
def report(runs: Sequence[Path], out: Path, predictions: Path | None, title: str | None, force: bool) -> None:
    """Write one page about RUNs, with their pictures.

    \b
      python cli.py evaluate runs/finetune --compare runs/from_scratch
      python cli.py predict runs/finetune photos/ --out predictions
      python cli.py report runs/peclr_rn50 runs/finetune runs/from_scratch --predictions predictions
      python cli.py report --predictions predictions

    A RUN is a folder of pre-training or fine-tuning. The page shows losses, results of evaluate, views, predictions and
    the worst poses, as far as the folders have them; without a RUN, predictions alone. For the first pre-training run
    it also computes the nearest neighbours of a few images, before and after pre-training; this needs the run's
    checkpoint and images.
    """
    from peclr_dali.train.report.write import is_report, write_report

    require_new(out, force=force or is_report(out))
    write_report(runs, out, predictions=predictions, title=title)
    say(f"{out}")
