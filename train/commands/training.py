"""Commands that train: pre-training, fine-tuning and the read-out of a frozen encoder."""

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from peclr_dali.train.commands.options import CALL, config_options, is_main_rank, run_options, say

if TYPE_CHECKING:
    from peclr_dali.train.config.finetuning import FinetuneConfig
    from peclr_dali.train.config.pretraining import Config
    from peclr_dali.train.runs.folder import Resume

C = TypeVar("C", bound="Config | FinetuneConfig")

check_option = click.option("--check", is_flag=True, help="Go as far as the first step, change nothing, and exit.")
start_option = click.option("--from", "start", metavar="RUN", help="Take this run, checkpoint or file of weights.")


@click.command()
@config_options
@run_options
@check_option
def pretrain(out: str | None, resume: "Resume", check: bool, **options: Any) -> None:
    """Pre-train an encoder on unlabelled images.

    \b
      python cli.py pretrain -c configs/demo.toml
      python cli.py pretrain -c configs/peclr_rn50.toml --set data.root=/data/freihand --resume auto
      python cli.py pretrain -c configs/peclr_rn152.toml -c configs/both_datasets.toml
      torchrun --standalone --nproc-per-node=8 cli.py pretrain -c configs/peclr_rn50.toml

    configs/peclr_rn50.toml and peclr_rn152.toml are the paper's recipe on FreiHAND. To add YouTube3DHands, give
    both_datasets.toml after one of them.

    The run's folder holds config.toml, metrics.jsonl, checkpoints, views.png and loss.png. Ctrl-C saves a checkpoint
    and ends the run.
    """
    from peclr_dali.train.config.pretraining import Config

    config = _resolve(Config, {"run.out": out}, **options)
    from peclr_dali.train.pretrain import pretrain as run

    folder = run(config, resume, check=check)
    if is_main_rank() and not check:
        _show_loss(folder.read_metrics())
        say(f"what the network saw: {folder.views_picture}")
        say(f"how the loss fell:    {folder.loss_picture}")
        say(f"all on one page:      {CALL} report {shlex.quote(str(folder.root))}")


@click.command()
@config_options
@start_option
@run_options
@check_option
def finetune(start: str | None, out: str | None, resume: "Resume", check: bool, **options: Any) -> None:
    """Fine-tune an encoder to poses on labelled images of hands.

    \b
      python cli.py finetune -c configs/finetune_demo.toml --from runs/demo --out runs/from_demo
      python cli.py finetune -c configs/finetune_rn50.toml --from runs/peclr_rn50 --set data.label_fraction=0.1
      torchrun --standalone --nproc-per-node=4 cli.py finetune -c configs/finetune_rn50.toml --set train.micro_batch=32

    --from is short for --set encoder.weights=...: a run's folder, a checkpoint, a file of torchvision's or the authors'
    weights, "peclr_rn18" of networks/, "imagenet" or "random". A fine-tuned network also gives its head, if that is of
    the same kind; --set pose.weights=random begins with a new one. The new run's folder holds the same files as in
    pre-training, and the checkpoint with the smallest error on held-out images.
    """
    from peclr_dali.train.config.finetuning import FinetuneConfig

    config = _resolve(FinetuneConfig, {"encoder.weights": start, "run.out": out}, **options)
    from peclr_dali.train.finetune import finetune as run
    from peclr_dali.train.pose.pose_run import best_of
    from peclr_dali.train.runs.meter import errors_in_words

    folder = run(config, resume, check=check)
    if is_main_rank() and not check:
        _show_loss(folder.read_metrics())
        validations = folder.read_validations()
        if validations:
            best = best_of(validations)
            say(f"held out: {errors_in_words(best)} at step {best['step']}, {folder.best.folder}")
            say(f"its predictions:   {folder.predictions_picture}")
        say(f"how the loss fell: {folder.loss_picture}")


@click.command()
@config_options
@start_option
@run_options
def probe(start: str | None, out: str | None, resume: "Resume", **options: Any) -> None:
    """Measure how well poses can be read from a frozen encoder.

    \b
      python cli.py probe -c configs/finetune_demo.toml --from runs/demo --out runs/probe_demo
      python cli.py evaluate runs/probe_demo

    A linear head is fitted in closed form. The configuration is fine-tuning's; keys of training and augmentation have
    no effect. It takes one pass over the images. The folder is one of a fine-tuning run, for evaluate and predict.
    """
    from peclr_dali.train.config.finetuning import FinetuneConfig

    config = _resolve(FinetuneConfig, {"encoder.weights": start, "run.out": out}, **options)
    from peclr_dali.train.probe import fit_read_out

    say(f"{fit_read_out(config, resume).checkpoints.latest()}")


def _resolve(
    kind: type[C], short: Mapping[str, str | None], files: Sequence[Path], overrides: Sequence[str], print_config: bool
) -> C:
    """The configuration of a run. With --print-config, print it and end the program.

    `short` holds the keys that have their own option.
    """
    from peclr_dali.pipelines.samples.shares import require_whole_micro_batches
    from peclr_dali.train.config.load import as_toml, load_config, to_toml

    settings = [f"{key}={as_toml(value)}" for key, value in short.items() if value is not None]
    config = load_config(kind, files, [*overrides, *settings])
    if print_config:
        click.echo(to_toml(config), nl=False)
        click.get_current_context().exit()
    require_whole_micro_batches(config.train.batch, config.train.micro_batch)
    warmup, epochs = config.optim.warmup_epochs, config.train.epochs
    if (warmup > epochs or warmup == epochs > 1) and is_main_rank():
        say(
            f"optim.warmup_epochs = {warmup:g} and train.epochs = {epochs}: the learning rate only rises. Set a "
            "shorter warm-up, or more epochs",
            err=True,
        )
    return config


def _show_loss(rows: Sequence[Mapping[str, float]]) -> None:
    if rows:  # there are none of a run that has finished before and whose rows are gone
        before = f"{rows[0]['loss']:.3f} -> " if len(rows) > 1 else ""
        say(f"loss {before}{rows[-1]['loss']:.3f} in {rows[-1]['step']} steps")
