"""The command predict: poses in pictures."""

import shlex
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import click

from peclr_dali.bounds import LARGEST_COUNT
from peclr_dali.train.commands.options import PATH, Number, force_option, say

BoxPx = tuple[float, float, float, float]
"""Left, upper, right and lower edge in pixels."""


def box_option(context: click.Context, parameter: click.Parameter, text: str | None) -> Path | BoxPx | None:
    """Read `--box`: the path of a file of boxes, or a box."""
    if text is None or text.lower().endswith((".csv", ".json")):
        return None if text is None else Path(text)
    with suppress(ValueError):
        x0, y0, x1, y1 = map(float, text.split(","))
        if -1e6 <= x0 < x1 <= 1e6 and -1e6 <= y0 < y1 <= 1e6:
            return x0, y0, x1, y1
    expected = "x0,y0,x1,y1 in pixels with x0 < x1 and y0 < y1, such as 40,30,180,170, or a .csv or .json file"
    raise click.BadParameter(f"{text!r}: expected {expected}.", context, parameter)


@click.command()
@click.argument("run", type=PATH)
@click.argument("images", nargs=-1, required=True, metavar="IMAGE...")
@click.option("--out", default="predictions", show_default=True, type=PATH, help="Folder.")
@click.option(
    "--box",
    default=None,
    callback=box_option,
    metavar="BOX",
    help="Box X0,Y0,X1,Y1 around the hand, in pixels; or a file of boxes, as for data.box: IMAGE is then the "
    "folder of its pictures.  [default: the whole picture]",
)
@click.option("--intrinsics", default=None, type=PATH, help="JSON file with one 3 x 3 camera matrix for all pictures.")
@click.option(
    "--scale-m",
    default=None,
    type=Number(0, 1, min_open=True),
    help="Length of the reference bone in metres; the pose is then in metres. A hand's reference bone is the first "
    "phalanx of the middle finger.",
)
@click.option(
    "--pictures",
    "drawings",
    default=1000,
    show_default=True,
    type=click.IntRange(0, LARGEST_COUNT),
    metavar="N",
    help="Draw the first N predictions; 0: none.",
)
@force_option
def predict(
    run: Path, images: Sequence[str], out: Path, box: Path | BoxPx | None, scale_m: float | None, **options: Any
) -> None:
    """Predict the pose in each IMAGE with a fine-tuned RUN.

    \b
      python cli.py predict networks/hand_photos_rn18.safetensors hand.jpg
      python cli.py predict runs/finetune_rn50 photo.jpg --box 420,310,760,640 --intrinsics camera.json --scale-m 0.03
      python cli.py predict runs/finetune_rn50 photos/ --box boxes.csv

    IMAGE is a file or a folder. The poses are written to predictions.json and drawn. Without --box the network sees the
    whole picture; tools/find_boxes.py finds the boxes of hands. Pictures that cannot be read are left out and listed at
    the end. The exit code is 2 only if no picture can be read.
    """
    from peclr_dali.train.pose.predict import EXPECTED
    from peclr_dali.train.pose.predict import predict as run_prediction
    from peclr_dali.train.pose.predictions import FILE
    from peclr_dali.train.runs.log import progress_bar

    boxes, box_px = (box, None) if isinstance(box, Path) else (None, box)
    with progress_bar("predicting") as progress:
        done = run_prediction(
            run, images, out, box_px=box_px, boxes=boxes, scale_m=scale_m, progress=progress, **options
        )
    say(f"{out / FILE}: {len(done.predictions)} poses")
    if box is None:
        say("each whole picture was taken as the surroundings of a hand: give --box if it fills less than half of it")
    if done.predictions[0].joints is None:
        say("the poses have only 2D keypoints: the network was trained without depths")
    elif scale_m is None:
        say("poses are scale-normalised: the middle finger's first phalanx has length 1. --scale-m gives metres")
    if options["intrinsics"] is None and done.predictions[0].joints is not None:
        say("the focal length is assumed to be the picture's longer side: set the true camera with --intrinsics")
    if done.unreadable:
        say(f"left out {len(done.unreadable)} pictures, which are not {EXPECTED}:", err=True)
    for file in done.unreadable:
        say(f"  {file}", err=True)
    say(f"all on one page: python cli.py report --predictions {shlex.quote(str(out))}")
