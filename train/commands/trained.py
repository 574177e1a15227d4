"""Commands on trained networks: evaluate, predict, report, convert, export."""

import shlex
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import click

from peclr_dali.bounds import LARGEST_COUNT
from peclr_dali.train.commands.options import COUNT, FILE, PATH, Number, config_options, force_option, say
from peclr_dali.writing import require_ending, require_new


class Evaluate(click.Command):
    """A command whose --compare takes all words up to the next option: those that the shell makes of a pattern."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Write --compare before each of its words."""
        option, words = "", list[str]()
        for word in args:
            if word.startswith("-"):
                option = word
            elif words and words[-1] != option == "--compare":
                words.append(option)
            words.append(word)
        return super().parse_args(ctx, words)


@click.command(cls=Evaluate)
@click.argument("runs", nargs=-1, required=True, type=PATH, metavar="RUN...")
@config_options
@click.option("--data", default=None, metavar="FOLDER", help="The dataset's folder; short for --set data.root=FOLDER.")
@click.option("--out", default=None, type=PATH, help="Folder for results.  [default: RUN/evaluation]")
@click.option(
    "--compare",
    multiple=True,
    type=PATH,
    metavar="RUN2...",
    help="Also measure these runs, and the difference: of two runs, or of pairs with the same seeds.",
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
    runs: Sequence[Path],
    files: Sequence[Path],
    overrides: Sequence[str],
    data: str | None,
    submission: bool,
    crop: Any,
    **options: Any,
) -> None:
    """Measure fine-tuned runs on labelled images.

    \b
      python cli.py evaluate runs/finetune
      python cli.py evaluate runs/finetune --set data.part=evaluation
      python cli.py evaluate runs/finetune --compare runs/from_scratch
      python cli.py evaluate runs/peclr_* --compare runs/simclr_* --out runs/comparison
      python cli.py evaluate runs/finetune --data /data/freihand --freihand-submission

    RUN is a folder or a checkpoint. It measures on the images that the run held out, or on all images of a part that is
    not split (data.part=evaluation). The results are metrics.json, poses.csv with a row per pose, pck.png and
    worst.png. Intervals are over groups of images: of the bootstrap, of fewer than 30 groups Student's t. Of fewer than
    3 groups, or if one of them is most of the images, there is none. They do not include the variation between training
    runs, except for the difference of several runs: each seed has a run on both sides, and the interval is over these
    pairs and over the images. Frames of a film are alike, so give --groups.
    """
    from rich.console import Console

    from peclr_dali.train.config.load import as_toml
    from peclr_dali.train.evaluation.evaluate import evaluate as measure
    from peclr_dali.train.runs.log import progress_bar

    settings = [f"data.root={as_toml(data)}"] if data is not None else []
    if submission:
        if len(runs) > 1 or any(override.startswith("data.part=") for override in overrides):
            raise click.UsageError(
                "--freihand-submission takes one RUN and data.part = 'evaluation': leave --set data.part=... out",
                click.get_current_context(),
            )
        settings += ["data.box=center"]
    settings += overrides
    crop = crop or ("two-pass" if submission else "boxes")
    with progress_bar("poses") as progress:
        tables, written = measure(runs, files, settings, crop=crop, submission=submission, progress=progress, **options)
    for table in tables:
        Console().print(table)
    for file in written:
        say(f"{file}")


def box_option(context: click.Context, parameter: click.Parameter, text: str | None) -> Path | Sequence[float] | None:
    """Read `--box`: the path of a file of boxes, or a box's left, upper, right and lower edge in pixels."""
    if text is None or text.lower().endswith((".csv", ".json")):
        return None if text is None else Path(text)
    with suppress(ValueError):
        x0, y0, x1, y1 = map(float, text.split(","))
        if -1e6 <= x0 < x1 <= 1e6 and -1e6 <= y0 < y1 <= 1e6:
            return x0, y0, x1, y1
    raise click.BadParameter(
        f"{text!r}: expected x0,y0,x1,y1 in pixels with x0 < x1 and y0 < y1, such as 40,30,180,170, or a .csv or .json "
        "file.",
        context,
        parameter,
    )


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
    type=Number(0, 0.25, min_open=True),
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
    run: Path,
    images: Sequence[str],
    out: Path,
    box: Path | Sequence[float] | None,
    scale_m: float | None,
    **options: Any,
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
    from peclr_dali.train.pose.predictions import FILE as PREDICTIONS
    from peclr_dali.train.runs.log import progress_bar

    boxes, box_px = (box, None) if isinstance(box, Path) else (None, box)
    with progress_bar("predicting") as progress:
        done = run_prediction(
            run, images, out, box_px=box_px, boxes=boxes, scale_m=scale_m, progress=progress, **options
        )
    say(f"{out / PREDICTIONS}: {len(done.predictions)} poses; a large spread_px is the sign of a poor one")
    if "hand_photos_rn18" in str(run):
        say("hand_photos_rn18 knows upright hands before a wall, in close boxes: networks/README.md says how well")
    if box is None:
        say("each whole picture was taken as the surroundings of a hand: give --box if it fills less than half of it")
    if done.predictions[0].joints is None:
        say("the poses have only 2D keypoints: the network was trained without depths")
    elif scale_m is None:
        say("poses are scale-normalised: the middle finger's first phalanx has length 1. --scale-m gives metres")
    if options["intrinsics"] is None and done.predictions[0].joints is not None:
        say("the focal length is assumed to be the picture's longer side: set the true camera with --intrinsics")
    if done.unreadable:
        say(f"left out {len(done.unreadable)} pictures, which cannot be read, or are not {EXPECTED}:", err=True)
    for file in done.unreadable:
        say(f"  {file}", err=True)
    say(f"all on one page: python cli.py report --predictions {shlex.quote(str(out))}")


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


@click.command()
@click.argument("source", type=PATH)
@click.argument("out", type=FILE)
@force_option
def convert(source: Path, out: Path, force: bool) -> None:
    """Convert a pose network of PeCLR's authors to a checkpoint.

    \b
      python cli.py convert rn50_peclr_yt3d-fh_pt_fh_ft.pth pose.pth

    evaluate, predict and export take it as a run. Names and shapes are checked. No code in the file is run. Encoders
    of the authors need no conversion: finetune --from reads them.
    """
    from peclr_dali.train.convert import convert as run

    require_new(out, force=force)
    say(run(source, out))


@click.command()
@click.argument("source", type=PATH)
@click.argument("out", required=False, type=FILE)
@click.option("--onnx", type=FILE, metavar="OUT.onnx", help="Write the whole pose network as ONNX.")
@click.option(
    "--pose",
    type=FILE,
    metavar="OUT.safetensors",
    help="Write the whole pose network in half precision, for predict, evaluate and finetune.",
)
@click.option(
    "--keys", type=click.Choice(["vitpose"]), help="Name OUT's tensors as ViTPose's ViT, for HaMeR, WiLoR and the like."
)
@force_option
def export(source: Path, out: Path | None, onnx: Path | None, pose: Path | None, force: bool, **options: Any) -> None:
    """Write a trained encoder for other programs, or as ONNX.

    \b
      python cli.py export runs/peclr_rn50 encoder.pth
      python cli.py export runs/peclr_vits backbone.pth --keys vitpose
      python cli.py export runs/finetune --onnx pose.onnx
      python cli.py export runs/finetune --pose hand.safetensors

    SOURCE is a run's folder or a checkpoint. OUT ends in .safetensors or .pth;
    `torchvision.models.resnet50().load_state_dict(..., strict=False)` loads it: only `fc` is missing. For an encoder of
    timm, the printed line has the call that loads it; with --keys vitpose, the call that builds ViTPose's ViT. --onnx
    compares onnxruntime's results with torch's. Beside each file a .json says how it was trained. The checkpoint is the
    newest in a pre-training run's folder, the best on validation (best/) in a fine-tuning run's.
    """
    from peclr_dali.train.export.onnx import export_onnx
    from peclr_dali.train.export.weights import card_beside, export_encoder, export_network

    files = [file for file in (out, onnx, pose) if file is not None]
    context = click.get_current_context()
    if not files or (out is None and any(options.values())):
        raise click.UsageError(
            "export needs a file to write: OUT for the encoder (--keys is for it alone), or --onnx OUT.onnx or --pose "
            "OUT.safetensors for the pose network.",
            context,
        )
    if len({file.resolve() for file in (source, *files)}) <= len(files):
        raise click.UsageError(f"{files[-1]} is named twice, and one file would replace another.", context)
    for file, endings in ((out, (".safetensors", ".pth")), (onnx, (".onnx",)), (pose, (".safetensors",))):
        if file is not None:  # before the first is written
            require_ending(file, *endings)
    require_new(*files, *map(card_beside, files), force=force)
    if onnx is not None:
        say(f"{onnx}: {export_onnx(source, onnx)}")
    if pose is not None:
        say(f"{pose}: {export_network(source, pose)}")
    if out is not None:
        say(f"{out}: {export_encoder(source, out, **options)}")
