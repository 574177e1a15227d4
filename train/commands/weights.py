"""Commands on weights: convert those of PeCLR's authors, export those of a run."""

from pathlib import Path
from typing import Any

import click

from peclr_dali.train.commands.options import FILE, PATH, force_option, say
from peclr_dali.writing import require_ending, require_new


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
