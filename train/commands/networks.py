"""Commands on trained networks: measure, predict, report, convert, export."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from errors import UserError
from train.commands.options import COUNT, FILE, PATH, FiniteRange, config_options, say


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
    help="Cut hands out by the data's boxes, or without boxes by the authors' two passes.  [default: boxes]",
)
@click.option(
    "--freihand-submission", "submission", is_flag=True, help="Write pred.json and pred.zip for FreiHAND's leaderboard."
)
@click.option("--proper-rotation", is_flag=True, help="Align by rotations only; FreiHAND's script allows reflections.")
@click.option("--worst", default=24, show_default=True, type=COUNT, help="Hands in the picture of the worst.")
def evaluate(
    run: Path,
    files: Sequence[Path],
    overrides: Sequence[str],
    data: str | None,
    crop: Any,
    submission: bool,
    **options: Any,
) -> None:
    """Measure a fine-tuned RUN (its folder, or a checkpoint) on labelled hands: EPE, AUC, PA-EPE, PA-AUC, 2D EPE.

    \b
      python cli.py evaluate runs/finetune
      python cli.py evaluate runs/finetune --set data.part=evaluation
      python cli.py evaluate runs/finetune --compare runs/from_scratch
      python cli.py evaluate runs/finetune --data /data/freihand --freihand-submission

    By default on the images that the run held out, or on all of a part that is not split, as data.part=evaluation.
    -c and --set change its configuration. Writes metrics.json, a row per hand, PCK curves and the worst hands.
    Intervals are bootstrapped over hands; they do not know the luck of a training run.
    --freihand-submission takes the evaluation part, in two passes.
    """
    from rich.console import Console

    from train.config.tables import as_toml
    from train.evaluation.evaluate import evaluate as measure
    from train.runs.log import configure_logging, progress_bar

    configure_logging()
    settings = [f"data.root={as_toml(data)}"] if data is not None else []
    if submission:
        if any(override.startswith("data.part=") for override in overrides):
            raise UserError("--freihand-submission takes data.part = 'evaluation': leave --set data.part=... out")
        settings += ["data.part=evaluation", "data.split=all", "data.box=center"]
        crop = crop or "two-pass"
    with progress_bar("poses") as progress:
        settings += overrides
        crop = crop or "boxes"
        done = measure(run, files, settings, crop=crop, submission=submission, progress=progress, **options)
    for table in done.tables:
        Console().print(table)
    for file in done.files:
        say(f"{file}")


@click.command()
@click.argument("run", type=PATH)
@click.argument("images", nargs=-1, required=True, metavar="IMAGE...")
@click.option("--out", default="predictions", show_default=True, type=PATH, help="Folder.")
@click.option("--box", default=None, metavar="X0,Y0,X1,Y1", help="Around the hand, in pixels.  [default: all of it]")
@click.option(
    "--intrinsics", default=None, type=PATH, help="JSON file with the camera matrix, one of 3 x 3 for all pictures."
)
@click.option(
    "--scale-m",
    default=None,
    type=FiniteRange(0, 1, min_open=True),
    help="Length of the middle finger's first phalanx, or a body's reference bone, in metres: the pose is in metres.",
)
def predict(
    run: Path, images: Sequence[str], out: Path, box: str | None, intrinsics: Path | None, scale_m: float | None
) -> None:
    """Predict the pose in each IMAGE (files, folders, patterns) with the fine-tuned RUN; draw it and write JSON.

    \b
      python cli.py predict runs/finetune_demo hand.jpg
      python cli.py predict runs/finetune_rn50 photo.jpg --box 420,310,760,640 --intrinsics camera.json --scale-m 0.03

    Nothing here detects hands: without --box the whole picture is shown to the network, as if the hand filled it.
    Pictures that cannot be read are left out and named at the end; it is an error only if there is no other.
    """
    from train.pose.predict import predict as run_prediction
    from train.runs.log import progress_bar

    box_px = None if box is None else _box_px(box)
    with progress_bar("predicting") as progress:
        done = run_prediction(
            run, images, out, box_px=box_px, intrinsics=intrinsics, scale_m=scale_m, progress=progress
        )
    for result in done.predictions:
        say(f"{result.picture}")
        if result.box_needed != "no":
            say(f"  {result.note}")
    first = done.predictions[0]
    if first.joints is None:
        say("only keypoints in the picture: the network was trained without depths")
    elif scale_m is None:
        say(f"poses are scale-normalised ({first.skeleton.reference_bone_words} is 1): --scale-m gives metres")
    if intrinsics is None:
        say("the camera is assumed (focal length = longer side of the picture): --intrinsics gives the true one")
    for line in done.unreadable:
        say(f"left out: {line}", err=True)


def _box_px(text: str) -> tuple[float, float, float, float]:
    try:
        x0, y0, x1, y1 = (FiniteRange(-1e6, 1e6)(edge) for edge in text.split(","))
    except (ValueError, click.BadParameter):
        raise UserError(f"--box {text}: expected four numbers x0,y0,x1,y1 in pixels, such as 40,30,180,170") from None
    return x0, y0, x1, y1


@click.command()
@click.argument("runs", nargs=-1, required=True, type=PATH, metavar="RUN...")
@click.option("--out", default="report.html", show_default=True, type=FILE, help="The page.")
@click.option("--predictions", default=None, type=PATH, help="A folder that predict wrote.")
@click.option("--title", default="From features to 3D hands", show_default=True, help="Of the page.")
def report(runs: Sequence[Path], out: Path, predictions: Path | None, title: str) -> None:
    """Write one page about the folders of pre-training and fine-tuning RUNs, with all its pictures inside.

    \b
      python cli.py evaluate runs/finetune --compare runs/from_scratch
      python cli.py predict runs/finetune photos/ --out predictions
      python cli.py report runs/peclr_rn50 runs/finetune runs/from_scratch --predictions predictions

    It shows what is there: losses, what evaluate measured and compared, views, predictions and the worst hands.
    """
    from train.report.write import write_report

    write_report(runs, out, predictions=predictions, title=title)
    say(f"{out}")


@click.command()
@click.argument("source", type=PATH)
@click.argument("out", type=FILE)
@click.option(
    "--to",
    type=click.Choice(["ours", "published", "lightning"]),
    default="ours",
    show_default=True,
    help="Whose reading: ours, that of the authors' published files, or of their pre-training's checkpoints.",
)
def convert(source: Path, out: Path, to: Any) -> None:
    """Convert weights of PeCLR's authors in SOURCE into ours, or a run of ours into theirs.

    \b
      python cli.py convert peclr_rn50_yt3dh_fh.pth encoder.safetensors
      python cli.py convert rn50_peclr_yt3d-fh_pt_fh_ft.pth pose.pth
      python cli.py convert runs/finetune theirs.pth --to published

    Names and shapes are checked, and nothing in the file is run. A published pose network becomes a checkpoint that
    evaluate, predict and export take as a run.
    """
    from train.weights.convert import convert as run

    say(run(source, out, to))


@click.command()
@click.argument("source", type=PATH)
@click.argument("out", required=False, type=FILE)
@click.option("--onnx", type=FILE, metavar="OUT.onnx", help="The whole pose network, as ONNX.")
def export(source: Path, out: Path | None, onnx: Path | None) -> None:
    """Write the encoder of SOURCE (a run's folder or a checkpoint) to OUT as a torchvision ResNet.

    \b
      python cli.py export runs/peclr_rn50 encoder.pth
      python cli.py export runs/finetune --onnx pose.onnx

    OUT ends in .safetensors or .pth; `torchvision.models.resnet50().load_state_dict(..., strict=False)` takes it, with
    only `fc` missing. --onnx writes a fine-tuned network with its head, and checks it against torch in onnxruntime.
    Of a fine-tuning run's folder both take the best checkpoint on validation (best/), of pre-training's the newest.
    """
    from train.weights.export import export_encoder, export_onnx

    if out is None and onnx is None:
        raise UserError("export needs a file to write: OUT for the encoder, or --onnx OUT.onnx for the pose network")
    if out is not None:
        say(f"{out}: {export_encoder(source, out)}")
    if onnx is not None:
        say(f"{onnx}: {export_onnx(source, onnx)}")
