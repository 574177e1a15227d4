"""The command evaluate: errors of a fine-tuned network on labelled images."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from peclr_dali.train.commands.options import COUNT, PATH, config_options, force_option, say


@click.command()
@click.argument("run", type=PATH)
@config_options
@click.option("--data", default=None, metavar="FOLDER", help="The dataset's folder; short for --set data.root=FOLDER.")
@click.option("--out", default=None, type=PATH, help="Folder for results.  [default: RUN/evaluation]")
@click.option(
    "--compare", default=None, type=PATH, metavar="RUN2", help="Also measure RUN2, and the paired difference."
)
@click.option(
    "--crop",
    type=click.Choice(["boxes", "two-pass"]),
    default=None,
    help="Crop by the data's boxes, or crop hands without boxes by the authors' two passes.  [default: boxes]",
)
@click.option(
    "--freihand-submission", "submission", is_flag=True, help="Write pred.json and pred.zip for FreiHAND's leaderboard."
)
@click.option("--proper-rotation", is_flag=True, help="Align by rotations only; FreiHAND's script allows reflections.")
@click.option(
    "--groups",
    default=None,
    metavar="N|COLUMN|PATTERN",
    help="Images that depend on each other, for the intervals: stretches of N in order, or those with the same text "
    "in a column of the boxes file or, by a regular expression such as '^(.*)/', in their names.  [default: the "
    "data's, such as FreiHAND's poses]",
)
@click.option("--worst", default=24, show_default=True, type=COUNT, help="Number of poses in worst.png.")
@force_option
def evaluate(
    run: Path, files: Sequence[Path], overrides: Sequence[str], data: str | None, submission: bool, **options: Any
) -> None:
    """Measure a fine-tuned RUN on labelled images.

    \b
      python cli.py evaluate runs/finetune
      python cli.py evaluate runs/finetune --set data.part=evaluation
      python cli.py evaluate runs/finetune --compare runs/from_scratch
      python cli.py evaluate runs/finetune --data /data/freihand --freihand-submission

    RUN is a folder or a checkpoint. It measures on the images that the run held out, or on all images of a part that is
    not split (data.part=evaluation). The results are metrics.json, poses.csv with a row per pose, pck.png and
    worst.png. Intervals are over groups of images: of the bootstrap, of fewer than 30 groups Student's t. Of fewer than
    3 groups, or if one of them is most of the images, there is none. They do not include the variation between training
    runs. Frames of a film are alike, so give --groups.
    """
    from rich.console import Console

    from peclr_dali.train.config.load import as_toml
    from peclr_dali.train.evaluation.evaluate import evaluate as measure
    from peclr_dali.train.runs.log import progress_bar

    settings = [f"data.root={as_toml(data)}"] if data is not None else []
    crop = options.pop("crop")
    if submission:
        if any(override.startswith("data.part=") for override in overrides):
            raise click.UsageError(
                "--freihand-submission takes data.part = 'evaluation': leave --set data.part=... out",
                click.get_current_context(),
            )
        settings += ["data.box=center"]
        crop = crop or "two-pass"
    settings += overrides
    with progress_bar("poses") as progress:
        tables, written = measure(
            run, files, settings, crop=crop or "boxes", submission=submission, progress=progress, **options
        )
    for table in tables:
        Console().print(table)
    for file in written:
        say(f"{file}")
