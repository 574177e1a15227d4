"""Commands on data: make-data, views, check-data, pack, index."""

import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from peclr_dali.errors import UserError, as_size
from peclr_dali.train.commands.options import (
    COUNT,
    FILE,
    PATH,
    SEED,
    config_options,
    force_option,
    pretraining_config,
    say,
    workers_option,
)
from peclr_dali.writing import require_ending, require_new

if TYPE_CHECKING:
    from peclr_dali.pipelines.config import DataConfig


@click.command("make-data")
@click.argument("out", type=PATH)
@click.option(
    "--poses", default=800, show_default=True, type=COUNT, help="Number of poses; each is rendered four times."
)
@click.option("--seed", default=0, show_default=True, type=SEED, help="Equal seeds give equal files.")
@click.option(
    "--scenes", default=40, show_default=True, type=COUNT, help="Backgrounds with their light, shared by the poses."
)
@click.option(
    "--varied", is_flag=True, help="Cameras from all directions, hands of all sizes, more sleeves and held objects."
)
@workers_option("Threads.")
def make_data(out: Path, poses: int, **options: Any) -> None:
    """Render hands in FreiHAND's layout, as data for a first try.

    They are written to OUT. If it holds this dataset already, nothing is done. If the rendering was interrupted, it is
    continued.
    """
    from peclr_dali.synthetic.dataset import make_dataset
    from peclr_dali.train.runs.log import progress_bar

    with progress_bar("rendering") as progress:
        make_dataset(out, poses=poses, progress=progress, **options)
    say(f"{out}: {4 * poses} training images of {poses} poses, and the evaluation part")


@click.command()
@config_options
@click.argument("out", type=FILE)
@click.option("--samples", default=24, show_default=True, type=COUNT, help="Number of images, each in two views.")
@force_option
def views(files: Sequence[Path], overrides: Sequence[str], out: Path, samples: int, force: bool) -> None:
    """Draw the views that a configuration makes.

    They are written to OUT (a .png). Keypoints are transformed by the views' matrices.
    """
    config = pretraining_config(files, overrides)
    import torch

    from peclr_dali.pipelines.config import refuse_among_images
    from peclr_dali.pipelines.loader.loader import build_loader
    from peclr_dali.pipelines.samples.order import Schedule, build_order
    from peclr_dali.pipelines.sources import load_index
    from peclr_dali.train.runs.pictures import save_views

    refuse_among_images(out, config.data)
    require_new(out, force=force)
    require_ending(out, ".png", ".jpg")
    index = load_index(config.data)
    count = min(samples, len(index))
    batch = max(count, min(config.train.batch, len(index)))  # the run's, where the data fills it
    schedule = Schedule(build_order(index, batch=batch, seed=config.run.seed), batch, range(count), last_step=1)
    with build_loader(index, schedule, config.pipelines, config.augmentation, device=torch.device("cpu")) as loader:
        save_views(out, next(iter(loader)), index, samples=count)
    say(f"{out}")


@click.command("check-data")
@config_options
@click.argument("out", type=FILE)
@force_option
def check_data(files: Sequence[Path], overrides: Sequence[str], out: Path, force: bool) -> None:
    """List the images of a configuration that cannot be used.

    Every image is decoded once, and every label is judged by the rules of all sources; OUT is a .jsonl.

    \b
      python cli.py check-data --set data.root=/data/freihand bad.jsonl
      python cli.py pretrain --set data.root=/data/freihand --set data.bad_list=bad.jsonl

    The exit code is 0 if every image can be used, 1 if some cannot, and 2 if none can or the check failed.
    """
    config = pretraining_config(files, overrides)
    require_ending(out, ".jsonl")
    require_new(out, force=force)  # before the work, which may take hours
    from peclr_dali.pipelines.sources import read_source
    from peclr_dali.train.check_data import check_data as check
    from peclr_dali.train.distributed.world import described_world
    from peclr_dali.train.runs.log import progress_bar

    index = read_source(replace(_only_source(config.data), bad_list=None, label_fraction=1.0))  # all its files
    with progress_bar("checking") as progress:
        reasons = check(
            index, config.pipelines, out, device=described_world(config.train.device).device, progress=progress
        )
    count = len(set(index.paths))
    say(f"{index.root}: {len(reasons)} of {count} images cannot be used, see {out}")
    for path, reason in list(reasons.items())[:5]:
        say(f"  {path}: {reason}")
    if len(reasons) == count:
        raise UserError(f"{index.root}: no image can be used. Mend or replace the files, or name another folder.")
    if reasons:
        say(f"leave them out with --set data.bad_list={out}")
        sys.exit(1)


def _only_source(sources: "Sequence[DataConfig]") -> "DataConfig":
    """The one source of a configuration."""
    source, *others = sources
    if others:
        raise UserError(f"{1 + len(others)} tables [[data]]: the file or folder is of one. Give each by itself.")
    return source


@click.command()
@config_options
@click.argument("out", type=PATH)
@click.option("--per-tar", default=8192, show_default=True, type=click.IntRange(1, 10**9), help="Images per tar file.")
@workers_option("Threads that read.")
@click.option("--index", "index_only", is_flag=True, help="Write only the index of the tar files that OUT holds.")
@force_option
def pack(
    files: Sequence[Path], overrides: Sequence[str], out: Path, index_only: bool, force: bool, **options: int
) -> None:
    """Pack the images of a configuration into tar files.

    \b
      python cli.py pack --set data.root=/data/freihand /data/freihand_shards
      python cli.py pretrain --set data.source=shards --set data.root=/data/freihand_shards
      python cli.py pack --index /data/webdataset

    OUT is a folder that is new or empty, and is there only when it is complete. With --index, OUT holds tar files of
    another program, such as webdataset's; they stay as they are.
    """
    if re.match(r"\w+:/", str(out)):
        raise UserError(
            f"{str(out).replace(':/', '://', 1)} is an address: tar files are written to a folder. Name one, and copy "
            "it there later."
        )
    from peclr_dali.train.runs.log import progress_bar

    if index_only:
        context = click.get_current_context()
        given = [context.get_parameter_source(name) for name in ("files", "overrides", "per_tar", "workers")]
        if ParameterSource.COMMANDLINE in given:
            raise click.UsageError("--index takes OUT and --force alone: it leaves the tar files as they are.", context)
        from peclr_dali.pipelines.sources.shards.pack import index_tars
        from peclr_dali.pipelines.sources.shards.tar_index import INDEX_FILE

        require_new(out / INDEX_FILE, force=force)
        with progress_bar("indexing") as progress:
            packed = index_tars(out, progress=progress)
    else:
        config = pretraining_config(files, overrides)
        from peclr_dali.pipelines.sources import load_index
        from peclr_dali.pipelines.sources.shards import choices
        from peclr_dali.pipelines.sources.shards.pack import pack as run

        source = _only_source(config.data)
        index = load_index(replace(source, box_margin=1.0))  # the margin belongs to the run that reads them
        with progress_bar("packing") as progress:
            packed = run(index, out, progress=progress, chosen=choices(source), **options)
    for path, reason in list(packed.left_out.items())[:5]:
        say(f"  {path}: {reason}", err=True)
    if packed.left_out:
        say(f"{len(packed.left_out)} images cannot be used and were left out", err=True)
    say(f"{out}: {packed.samples} images in {packed.tars} tar files of {as_size(packed.bytes)}")
