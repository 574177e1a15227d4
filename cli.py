"""Command line: parses, loads the configuration, calls one function.

Run as `python cli.py COMMAND`, or under `torchrun` for several processes.
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from errors import ToldByAnother, UserError

if TYPE_CHECKING:
    from train.config import Config

F = TypeVar("F", bound=Callable[..., Any])


class OneLineErrors(click.Group):
    """Whatever is wrong with the input ends in one line and exit code 2."""

    def main(self, *args: Any, **kwargs: Any) -> Any:
        """Run the command that the arguments name."""
        try:
            super().main(*args, **{**kwargs, "standalone_mode": False})
        except ToldByAnother:
            sys.exit(2)
        except UserError as error:
            _fail(str(error))
        except click.exceptions.NoArgsIsHelpError as request:
            click.echo(request.format_message())
        except click.UsageError as error:
            words = error.ctx.command_path.split()[1:] if error.ctx is not None else []
            _fail(f"{error.format_message()} See '{' '.join(['python cli.py', *words, '--help'])}'.")
        except click.ClickException as error:
            _fail(error.format_message())
        except (click.Abort, KeyboardInterrupt):
            click.echo("aborted", err=True)
            sys.exit(130)
        sys.exit(0)


def _fail(message: str) -> None:
    rank = os.environ.get("RANK", "0")
    prefix = "error" if rank == "0" else f"rank {rank} on {platform.node()}: error"
    click.echo(f"{prefix}: {' '.join(message.split())}", err=True)
    sys.exit(2)


def config_options(command: F) -> F:
    """`-c` and `--set`, as every command with a configuration takes them."""
    command = click.option(
        "--set",
        "overrides",
        multiple=True,
        metavar="KEY=VALUE",
        help="Change one key, such as optim.lr=3e-4; repeatable.",
    )(command)
    return click.option(
        "-c",
        "--config",
        "files",
        multiple=True,
        type=click.Path(path_type=Path),
        metavar="FILE.toml",
        help="Configuration; repeatable, later files win. Without it: the paper's values.",
    )(command)


def _config(files: Sequence[Path], overrides: Sequence[str]) -> Config:
    from train.config import Config, load_config

    return load_config(Config, files, overrides)


@click.group(cls=OneLineErrors, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
def main() -> None:
    """Pre-train pose encoders on unlabelled images: PeCLR on NVIDIA DALI.

    A first try, in minutes and without a GPU:

    \b
      python cli.py make-data .data/hands --poses 800
      python cli.py pretrain -c configs/demo.toml

    Your own images, on a GPU:

    \b
      python cli.py pretrain -c configs/peclr_rn50.toml -c configs/rtx_11gb.toml \\
          --set data.source=folder --set data.root=/path/to/images
    """


@main.command("make-data")
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--poses", default=800, show_default=True, type=click.IntRange(1), help="Hands; each gives four images.")
@click.option("--seed", default=0, show_default=True, type=click.IntRange(0), help="Equal seeds give equal bytes.")
@click.option("--scenes", default=40, show_default=True, type=click.IntRange(1), help="Backgrounds and lights, shared.")
@click.option("--workers", default=None, type=click.IntRange(1), help="Processes.  [default: one per core]")
def make_data(out: Path, poses: int, seed: int, scenes: int, workers: int | None) -> None:
    """Render hands in FreiHAND's layout to OUT, to try everything without the dataset.

    Does nothing if OUT holds this very dataset, and goes on with it if it was interrupted.
    """
    from pipelines.synthetic import make_dataset
    from train.log import progress_bar

    with progress_bar("rendering") as progress:
        make_dataset(out, poses=poses, seed=seed, scenes=scenes, workers=workers, progress=progress)
    click.echo(f"{out}: {4 * poses} training images of {poses} poses, and the evaluation part")


@main.command()
@config_options
@click.option("--out", default=None, metavar="FOLDER", help="The run's folder; short for --set run.out=FOLDER.")
@click.option(
    "--resume",
    type=click.Choice(["never", "auto"]),
    default="never",
    show_default=True,
    help="auto: go on from the newest checkpoint in the run's folder, if there is one.",
)
@click.option("--print-config", is_flag=True, help="Print the resolved configuration as TOML and leave.")
def pretrain(files: Sequence[Path], overrides: Sequence[str], out: str | None, resume: Any, print_config: bool) -> None:
    """Pre-train an encoder on unlabelled images.

    \b
      python cli.py pretrain -c configs/demo.toml
      python cli.py pretrain -c configs/peclr_rn50.toml --set data.root=/data/freihand --resume auto
      torchrun --nproc-per-node=8 cli.py pretrain -c configs/peclr_rn50.toml

    The run's folder holds config.toml, metrics.jsonl, checkpoints, views.png and loss.png. Ctrl-C saves and leaves.
    """
    from train.config import as_toml, to_toml

    config = _config(files, [*overrides, *([f"run.out={as_toml(out)}"] if out else [])])
    if print_config:
        click.echo(to_toml(config), nl=False)
        return
    from train.interrupt import Interrupted
    from train.log import configure_logging
    from train.pretrain import pretrain as run

    configure_logging()
    try:
        folder = run(config, resume)
    except Interrupted as stop:
        if os.environ.get("RANK", "0") == "0":
            click.echo(str(stop), err=True)
        sys.exit(stop.exit_code)
    if os.environ.get("RANK", "0") == "0":
        rows = folder.read_metrics()
        click.echo(f"loss {rows[0]['loss']:.3f} -> {rows[-1]['loss']:.3f} in {rows[-1]['step']} steps")
        click.echo(f"what the network saw: {folder.views_picture}")
        click.echo(f"how the loss fell:    {folder.loss_picture}")


@main.command()
@config_options
@click.option(
    "--from", "start", default=None, metavar="RUN", help="Start from this run, checkpoint or file of weights."
)
@click.option("--out", default=None, metavar="FOLDER", help="The run's folder; short for --set run.out=FOLDER.")
@click.option(
    "--resume",
    type=click.Choice(["never", "auto"]),
    default="never",
    show_default=True,
    help="auto: go on from the newest checkpoint in the run's folder, if there is one.",
)
@click.option("--print-config", is_flag=True, help="Print the resolved configuration as TOML and leave.")
def finetune(
    files: Sequence[Path],
    overrides: Sequence[str],
    start: str | None,
    out: str | None,
    resume: Any,
    print_config: bool,
) -> None:
    """Fine-tune an encoder to 3D hand pose on labelled images.

    \b
      python cli.py finetune -c configs/finetune_demo.toml --from runs/demo
      python cli.py finetune -c configs/finetune_rn50.toml --from runs/peclr_rn50 --set data.label_fraction=0.1
      torchrun --nproc-per-node=4 cli.py finetune -c configs/finetune_rn50.toml --set train.micro_batch=32

    --from is short for --set encoder.weights=...: a run's folder, a checkpoint, a file of torchvision's or the
    authors' weights, "imagenet" or "random". The run's folder holds what pre-training's does, and the best checkpoint
    on held-out images.
    """
    from train.config import as_toml, load_config, to_toml
    from train.finetune_config import FinetuneConfig

    named = {"encoder.weights": start, "run.out": out}
    settings = [f"{key}={as_toml(value)}" for key, value in named.items() if value]
    config = load_config(FinetuneConfig, files, [*overrides, *settings])
    if print_config:
        click.echo(to_toml(config), nl=False)
        return
    from train.finetune import finetune as run
    from train.interrupt import Interrupted
    from train.log import configure_logging

    configure_logging()
    try:
        folder = run(config, resume)
    except Interrupted as stop:
        click.echo(str(stop), err=True)
        sys.exit(stop.exit_code)
    if os.environ.get("RANK", "0") == "0":
        rows, validations = folder.read_metrics(), folder.read_validations()
        click.echo(f"loss {rows[0]['loss']:.3f} -> {rows[-1]['loss']:.3f} in {rows[-1]['step']} steps")
        if validations:
            best = min(validations, key=lambda row: row["pa_epe_cm"])
            click.echo(
                f"held out: PA-EPE {best['pa_epe_cm']:.2f} cm, EPE {best['epe_cm']:.2f} cm, 2D {best['epe_px']:.1f} px "
                f"at step {best['step']}, {folder.best.folder}"
            )
            click.echo(f"what it predicts:  {folder.predictions_picture}")
        click.echo(f"how the loss fell: {folder.loss_picture}")


@main.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.argument("images", nargs=-1, required=True, metavar="IMAGE...")
@click.option("--out", default="predictions", show_default=True, type=click.Path(path_type=Path), help="Folder.")
@click.option("--box", default=None, metavar="X0,Y0,X1,Y1", help="Around the hand, in pixels.  [default: all of it]")
@click.option("--intrinsics", default=None, type=click.Path(path_type=Path), help="JSON file with the camera matrix.")
@click.option(
    "--scale-m",
    default=None,
    type=click.FloatRange(0, 1, min_open=True),
    help="Length of the middle finger's first phalanx in metres, to get the pose in metres.",
)
def predict(
    run: Path, images: Sequence[str], out: Path, box: str | None, intrinsics: Path | None, scale_m: float | None
) -> None:
    """Predict the hand in each IMAGE (files, folders, patterns) with the fine-tuned RUN; draw it and write JSON.

    \b
      python cli.py predict runs/finetune_demo hand.jpg
      python cli.py predict runs/finetune_rn50 photo.jpg --box 420,310,760,640 --intrinsics camera.json --scale-m 0.03

    Nothing here detects hands: without --box the whole picture is shown to the network, as if the hand filled it.
    """
    from train.log import progress_bar
    from train.predict import predict as run_prediction

    box_px = None if box is None else _box_px(box)
    with progress_bar("predicting") as progress:
        results = run_prediction(
            run, images, out, box_px=box_px, intrinsics=intrinsics, scale_m=scale_m, progress=progress
        )
    for result in results:
        click.echo(f"{result.picture}")
        if result.box_needed != "no":
            click.echo(f"  {result.note}")
    if scale_m is None:
        click.echo("poses are scale-normalised (the middle finger's first phalanx is 1): --scale-m gives metres")
    if intrinsics is None:
        click.echo("the camera is assumed (focal length = longer side of the picture): --intrinsics gives the true one")


def _box_px(text: str) -> tuple[float, float, float, float]:
    try:
        x0, y0, x1, y1 = (float(edge) for edge in text.split(","))
    except ValueError:
        raise UserError(f"--box {text}: expected four numbers x0,y0,x1,y1 in pixels, such as 40,30,180,170") from None
    return x0, y0, x1, y1


@main.command()
@config_options
@click.argument("out", type=click.Path(path_type=Path, dir_okay=False))
@click.option("--samples", default=24, show_default=True, type=click.IntRange(1), help="Images; each in two views.")
def views(files: Sequence[Path], overrides: Sequence[str], out: Path, samples: int) -> None:
    """Draw the views that a configuration makes, with the keypoints that their matrices carry, to OUT (a .png)."""
    from train.preview import preview

    preview(_config(files, overrides), out, samples=samples)
    click.echo(f"{out}")


@main.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Change one key; repeatable.")
@click.option("--record", type=click.Path(path_type=Path, dir_okay=False), help="Append every figure to this file.")
def experiment(file: Path, overrides: Sequence[str], record: Path | None) -> None:
    """Run the experiment of FILE.toml: pre-train and fine-tune in several ways over several seeds, and compare.

    \b
      python cli.py experiment configs/experiment_hands.toml --record bench/results/experiments.jsonl

    What was interrupted goes on where it was, down to the step.
    """
    from rich.console import Console

    from bench.experiments import as_table, load_experiment, run_experiment
    from train.interrupt import Interrupted
    from train.log import configure_logging

    configure_logging()
    try:
        outcomes = run_experiment(load_experiment(file, overrides), record)
    except Interrupted as stop:
        click.echo(f"{stop}, by giving this command again", err=True)
        sys.exit(stop.exit_code)
    Console().print(as_table(outcomes))


@main.command("bench-loader")
@config_options
@click.option("--cores", default=None, type=click.IntRange(1), help="Cores for every loader.  [default: all]")
@click.option("--batch", default=256, show_default=True, type=click.IntRange(1), help="Images in a batch.")
@click.option("--repeats", default=7, show_default=True, type=click.IntRange(2), help="Rounds; each times all once.")
@click.option("--seconds", default=2.0, show_default=True, type=click.FloatRange(0.1), help="Least length of a repeat.")
@click.option("--peers/--no-peers", default=True, show_default=True, help="Measure what people use instead, too.")
@click.option("--large", is_flag=True, help="On 1280 x 720 frames with a hand, made of the configured images.")
@click.option("--step", is_flag=True, help="Measure the training step too, for the verdict.")
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON instead of a table.")
@click.option("--plot", type=click.Path(path_type=Path, dir_okay=False), metavar="OUT.png", help="Draw what was found.")
@click.option("--record", type=click.Path(path_type=Path, dir_okay=False), help="Append the JSON to this file, a line.")
@click.option(
    "--compare",
    metavar="FILE[:NUMBER]",
    help="Fail (exit 1) if slower, beyond both intervals, than this row, or the file's last.",
)
@click.option("--tune", is_flag=True, help="Instead: find the loader's settings for this machine, as TOML.")
@click.option(
    "--soak",
    "soak_minutes",
    type=click.FloatRange(0.1),
    metavar="MINUTES",
    help="Instead: run our loader so long; fails (exit 1) if memory or open files grow after the first minute.",
)
@click.option("--first-batch", is_flag=True, help="Instead: how long the index and the first batch take.")
@click.option(
    "--history",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="OUT.png",
    help="Instead: draw images/s over the rows of --record's file, by default bench/results/loader.jsonl.",
)
def bench_loader(
    files: Sequence[Path],
    overrides: Sequence[str],
    cores: int | None,
    as_json: bool,
    record: Path | None,
    soak_minutes: float | None,
    first_batch: bool,
    history: Path | None,
    tune: bool,
    **options: Any,
) -> None:
    """Is training loader-bound, and by what? Our loader, its parts, and other loaders, on the same cores in one run.

    \b
      python cli.py make-data .data/hands
      python cli.py bench-loader --step --plot loader.png
      python cli.py bench-loader --tune
      python cli.py bench-loader --record bench/results/loader.jsonl
      python cli.py bench-loader --soak 60 --record bench/results/soak.jsonl
    """
    from bench import commands
    from pipelines.loader import available_cores
    from train.log import configure_logging

    configure_logging()
    if history is not None:
        click.echo(commands.draw_history(record or Path("bench/results/loader.jsonl"), history))
        return
    config, on_cores = _config(files, overrides), cores or available_cores()
    if tune:
        click.echo(commands.tune_loader(config, on_cores, options["batch"]), nl=False)
    elif soak_minutes is not None:
        steady = commands.soak_loader(config, on_cores, options["batch"], soak_minutes, as_json=as_json, record=record)
        sys.exit(0 if steady else 1)
    elif first_batch:
        commands.time_first_batch(config, on_cores, options["batch"], as_json=as_json, record=record)
    else:
        slower = commands.bench_loader(config, on_cores, as_json=as_json, record=record, **options)
        if slower is not None:
            click.echo(f"error: {slower}", err=True)
            sys.exit(1)


@main.command("bench-docs")
@click.option("--results", default="bench/results", show_default=True, type=click.Path(path_type=Path, file_okay=False))
@click.option("--page", default="docs/performance.md", show_default=True, type=click.Path(path_type=Path, exists=True))
def bench_docs(results: Path, page: Path) -> None:
    """Write the tables of docs/performance.md, and its picture, anew from the rows of bench/results/."""
    from bench import commands

    click.echo(commands.write_docs(results, page))


@main.command("bench-train")
@config_options
@click.option(
    "--precision",
    "precisions",
    multiple=True,
    type=click.Choice(["fp64", "fp32", "bf16", "fp16"]),
    help="Repeatable.  [default: fp32 and bf16; on a GPU fp16 too]",
)
@click.option("--repeats", default=5, show_default=True, type=click.IntRange(2), help="Rounds; each times all once.")
@click.option("--seconds", default=2.0, show_default=True, type=click.FloatRange(0.1), help="Least length of a repeat.")
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON instead of a table.")
@click.option("--record", type=click.Path(path_type=Path, dir_okay=False), help="Append the JSON to this file, a line.")
def bench_train(
    files: Sequence[Path],
    overrides: Sequence[str],
    precisions: Sequence[str],
    repeats: int,
    seconds: float,
    as_json: bool,
    record: Path | None,
) -> None:
    """Measure the training step: with batches at hand, with the loader, and what the exact large batch costs.

    \b
      python cli.py bench-train -c configs/demo.toml
      python cli.py bench-train -c configs/peclr_rn50.toml -c configs/a100.toml --record bench/results/train.jsonl
    """
    from bench import commands
    from train.log import configure_logging

    configure_logging()
    config = _config(files, overrides)
    commands.bench_train(config, precisions, repeats, seconds, as_json=as_json, record=record)


@main.command("check-data")
@config_options
@click.argument("out", type=click.Path(path_type=Path, dir_okay=False))
def check_data(files: Sequence[Path], overrides: Sequence[str], out: Path) -> None:
    """Decode every image of a configuration's data once, and list those that cannot be used in OUT (a .jsonl).

    \b
      python cli.py check-data --set data.root=/data/freihand bad.jsonl
      python cli.py pretrain --set data.root=/data/freihand --set data.bad_list=bad.jsonl
    """
    from train import check_data as check
    from train.distributed import described_world
    from train.log import progress_bar

    config = _config(files, overrides)
    device = described_world(config.train.device).device
    with progress_bar("checking") as progress:
        found = check.check_data(config.data, config.pipelines, out, device=device, progress=progress)
    for one in found:
        click.echo(
            f"{one.index.root}: {len(one.reasons)} of {len(one.index)} images cannot be used, see {one.list_file}"
        )
        for path, reason in list(one.reasons.items())[:5]:
            click.echo(f"  {path}: {reason}")
        if one.reasons:
            click.echo(f"leave them out with --set {one.key}.bad_list={one.list_file}")


@main.command()
@config_options
@click.argument("out", type=click.Path(path_type=Path))
@click.option(
    "--per-shard", default=8192, show_default=True, type=click.IntRange(1, 10**9), help="Images in one tar file."
)
@click.option("--workers", default=None, type=click.IntRange(1), help="Shards at a time.  [default: one per core]")
def pack(files: Sequence[Path], overrides: Sequence[str], out: Path, per_shard: int, workers: int | None) -> None:
    """Pack the images of a configuration's data into WebDataset tar shards in OUT.

    \b
      python cli.py pack --set data.root=/data/freihand /data/freihand_shards
      python cli.py pretrain --set data.source=shards --set data.root=/data/freihand_shards

    Goes on where an interrupted call stopped, reads back what it wrote, and never overwrites anything.
    """
    from train.log import progress_bar
    from train.pack import pack_data

    with progress_bar("packing") as progress:
        packed = pack_data(_config(files, overrides), out, per_shard=per_shard, workers=workers, progress=progress)
    if packed.left_out:
        click.echo(f"{packed.left_out} images cannot be used and were left out, see {out / 'left_out.jsonl'}", err=True)
    done = "is packed already" if packed.already_there else "written and read back"
    click.echo(f"{out}: {packed.samples} images in {packed.shards} shards of {packed.bytes / 2**20:.0f} MiB, {done}")


@main.command("bench-scale")
@config_options
@click.option(
    "--cluster", "cluster_file", type=click.Path(path_type=Path), help="A TOML file that describes a cluster."
)
@click.option("--nodes", default="1,2,4,8,16,32", show_default=True, help="To project to, separated by commas.")
@click.option("--repeats", default=5, show_default=True, type=click.IntRange(1), help="Timed steps of each size.")
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON instead of a table.")
@click.option("--record", type=click.Path(path_type=Path, dir_okay=False), help="Append the JSON to this file, a line.")
def bench_scale(
    files: Sequence[Path],
    overrides: Sequence[str],
    cluster_file: Path | None,
    nodes: str,
    repeats: int,
    as_json: bool,
    record: Path | None,
) -> None:
    """Measure the step and the exchanges between the ranks at hand, and project to more nodes.

    \b
      python cli.py bench-scale -c configs/demo.toml
      torchrun --nproc-per-node=2 cli.py bench-scale -c configs/demo.toml --cluster launch/cluster.toml

    Without --cluster the ranks at hand are taken for one node, and the link between them for the one between nodes.
    """
    import json

    from bench import scaling
    from train.config import load_config

    if not all(word.strip().isdecimal() and int(word) > 0 for word in nodes.split(",")):
        raise UserError(f"--nodes {nodes}: expected numbers separated by commas, such as 1,2,4")
    config = _config(files, overrides)
    described = load_config(scaling.Cluster, [cluster_file], []) if cluster_file is not None else None
    measured, world = scaling.measure(config, repeats=repeats)
    if not world.is_main:
        return
    work, here = scaling.work_of(config), scaling.this_machine(measured)
    cluster = described or here
    rows = [scaling.project(work, cluster, int(word)) for word in nodes.split(",")]
    row = json.dumps(scaling.as_json(measured, work, here, cluster, rows))
    if as_json:
        click.echo(row)
    else:
        from rich.console import Console

        console = Console()
        console.print(
            f"measured here, {measured.ranks} ranks: {here.micro_batch_s:.4f} s per micro-batch, {here.fixed_s:.4f} s "
            f"fixed, {measured.step_s:.4f} s per step (the model says {scaling.project(work, here, 1).step_s:.4f} s)"
        )
        if measured.ranks > 1:
            console.print(
                f"sums over the ranks: {here.inside.latency_s * 1e6:.0f} us per hop, "
                f"{here.inside.bytes_per_s / 1e9:.2f} GB/s"
            )
        console.print(scaling.as_table(rows, work, cluster))
    if record is not None:
        with record.open("a") as file:
            file.write(row + "\n")


@main.command()
@click.argument("run", type=click.Path(path_type=Path))
@config_options
@click.option("--data", default=None, metavar="FOLDER", help="The dataset's folder; short for --set data.root=FOLDER.")
@click.option(
    "--out", default=None, type=click.Path(path_type=Path), help="Folder for results.  [default: RUN/evaluation]"
)
@click.option(
    "--compare",
    default=None,
    type=click.Path(path_type=Path),
    metavar="RUN2",
    help="Also measure RUN2, and the paired difference.",
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
@click.option(
    "--worst", default=24, show_default=True, type=click.IntRange(1), help="Hands in the picture of the worst."
)
def evaluate(
    run: Path,
    files: Sequence[Path],
    overrides: Sequence[str],
    data: str | None,
    out: Path | None,
    compare: Path | None,
    crop: Any,
    submission: bool,
    proper_rotation: bool,
    worst: int,
) -> None:
    """Measure a fine-tuned RUN (its folder, or a checkpoint) on labelled hands: EPE, AUC, PA-EPE, PA-AUC, 2D EPE.

    \b
      python cli.py evaluate runs/finetune
      python cli.py evaluate runs/finetune --set data.part=evaluation --set data.split=all
      python cli.py evaluate runs/finetune --compare runs/from_scratch
      python cli.py evaluate runs/finetune --data /data/freihand --freihand-submission

    By default on the images that the run held out. -c and --set change its configuration. Writes metrics.json, a row
    per hand, PCK curves and the worst hands. Intervals are bootstrapped over hands; they do not know the luck of a
    training run.
    --freihand-submission takes the evaluation part, in two passes.
    """
    from rich.console import Console

    from train.config import as_toml
    from train.evaluate import evaluate as measure
    from train.log import configure_logging, progress_bar

    configure_logging()
    settings = [f"data.root={as_toml(data)}"] if data else []
    if submission:
        settings += ["data.part=evaluation", "data.split=all", "data.box=center"]
        crop = crop or "two-pass"
    with progress_bar("poses") as progress:
        done = measure(
            run,
            files,
            [*settings, *overrides],
            out=out,
            compare=compare,
            crop=crop or "boxes",
            worst=worst,
            submission=submission,
            proper_rotation=proper_rotation,
            progress=progress,
        )
    for table in done.tables:
        Console().print(table)
    for file in done.files:
        click.echo(f"{file}")


@main.command()
@click.argument("source", type=click.Path(path_type=Path))
@click.argument("out", type=click.Path(path_type=Path, dir_okay=False))
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
    from train.convert import convert as run

    click.echo(run(source, out, to))


@main.command()
@click.argument("source", type=click.Path(path_type=Path))
@click.argument("out", type=click.Path(path_type=Path, dir_okay=False))
def export(source: Path, out: Path) -> None:
    """Write the encoder of SOURCE (a run's folder or a checkpoint) to OUT as a torchvision ResNet.

    OUT ends in .safetensors or .pth; `torchvision.models.resnet50().load_state_dict(..., strict=False)` takes it, with
    only `fc` missing.
    """
    from train.export import export_encoder

    name = export_encoder(source, out)
    click.echo(f"{out}: {name}, torchvision's names, without fc")


if __name__ == "__main__":
    main()
