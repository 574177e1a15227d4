"""The training loop, shared by pre-training and fine-tuning: from a configuration to a finished run."""

from __future__ import annotations

import gc
import logging
import math
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch

from peclr_dali.errors import AnotherRankFailed, MachineError, UserError, in_one_line
from peclr_dali.machine import available_cores
from peclr_dali.pipelines.loader.loader import Loader, build_loader
from peclr_dali.pipelines.samples.index import Index
from peclr_dali.pipelines.samples.order import RankSlice, Schedule, build_order, steps_per_epoch
from peclr_dali.pipelines.samples.shares import micro_batch_share
from peclr_dali.pipelines.sources import load_index
from peclr_dali.train.config.finetuning import FinetuneConfig
from peclr_dali.train.config.load import FREE_BETWEEN_RANKS, first_different_key, flatten, to_dict
from peclr_dali.train.config.pretraining import Config
from peclr_dali.train.distributed.all_ranks import on_all_ranks, on_main, require_same, steps_of_all_ranks
from peclr_dali.train.distributed.interrupt import Interrupted, StopSignals
from peclr_dali.train.distributed.world import World, described_world, joined
from peclr_dali.train.runs.bad_files import BadFiles
from peclr_dali.train.runs.checkpoint import BackgroundWriter, load_checkpoint
from peclr_dali.train.runs.folder import Resume, RunFolder
from peclr_dali.train.runs.meter import Meter
from peclr_dali.train.runs.pictures import save_views
from peclr_dali.train.steps.training_state import N, R, Result, TrainingState

log = logging.getLogger(__name__)
B = TypeVar("B")


class Task(TrainingState[N, R]):
    """A kind of training: state and step, and its own logs, validation and pictures.

    Attributes:
        title: title of the progress bar.
        views: number of views of an image.
        config: the run's configuration.
    """

    title: ClassVar[str]
    views: ClassVar[int]
    config: Any

    @abstractmethod
    def log_start(self, index: Index) -> None:
        """Log what is special to this kind of training; called on rank 0."""

    @abstractmethod
    def draw(self, folder: RunFolder) -> None:
        """Draw the run's curves; called in another thread after each checkpoint."""

    @property
    @abstractmethod
    def validation_due(self) -> bool:
        """Whether to call `validate` after this step."""

    @abstractmethod
    def validate(self, folder: RunFolder) -> dict[str, float] | None:
        """Validate; returns the row for validation.jsonl, the same on all ranks, or None if there are no images."""


class Trainer:
    """A run. Under torchrun, every rank makes one.

    Args:
        build_task: the task's class: `build_task(config, world, steps_per_epoch, index, fresh=...)`.

    Raises:
        UserError: the environment is inconsistent, or batch, micro-batch and number of ranks do not fit each other.
    """

    def __init__(
        self, config: Config | FinetuneConfig, resume: Resume, build_task: Callable[..., Task[Any, Any]]
    ) -> None:
        self.config, self.resume, self.build_task = config, resume, build_task
        self.world = described_world(config.train.device)
        train, world = config.train, self.world
        # Before the ranks connect: if this check fails, it fails on all ranks, and none waits for another.
        self.share = micro_batch_share(train.batch, train.micro_batch, world.rank, world.world_size)
        self.folder = RunFolder(Path(config.run.out), keep=config.run.keep)

    def run(self) -> RunFolder:
        """Take the remaining steps and return the folder with metrics, pictures and checkpoints.

        Raises:
            UserError: the input cannot be used, or the loss is not finite.
            Interrupted: SIGTERM or Ctrl-C came; the state is saved.
        """
        with joined(self.world, self.config.run.rank_timeout_s), ExitStack() as held:
            _require_same_configuration(self.world, self.config)
            on_main(self.world, lambda: held.enter_context(self.folder.lock()))
            checkpoint = self.world.gather_objects(
                on_main(self.world, lambda: self.folder.check(self.config, self.resume))
            )[0]
            held.callback(gc.unfreeze)
            self._run(checkpoint)
        return self.folder

    def _run(self, checkpoint: Path | None) -> None:
        config, world, folder = self.config, self.world, self.folder
        set_threads(config.train.threads, world)
        torch.manual_seed(config.run.seed)

        # The images, in the order of their epochs.
        index = on_all_ranks(world, lambda: load_index(config.data))
        require_same(world, "data", index.in_words(), "Make data.root alike on all hosts")
        batch, micro_batch = config.train.batch, config.train.micro_batch
        count = partial(steps_per_epoch, index, batch, micro_batch=micro_batch, world_size=world.world_size)
        epoch_steps = on_all_ranks(world, count)
        order = build_order(index, batch=batch, seed=config.run.seed)

        # The network and its optimiser, new or from the checkpoint.
        build_task = partial(self.build_task, config, world, epoch_steps, index, fresh=checkpoint is None)
        task = on_all_ranks(world, build_task)
        require_same(world, "precisions", task.precision, "Set train.precision to one that all hosts have")
        bad_files = BadFiles(index, config.data, folder.quarantine_file, world)
        if checkpoint is not None:
            on_all_ranks(world, lambda: self._restore(task, bad_files, checkpoint, index.counts))
        if task.steps_done >= task.total_steps:
            log.info("%s has finished its %d steps already", folder.root, task.total_steps)
            return
        # Not before: a run that could not start must leave no files.
        on_main(world, lambda: folder.claim(self.config, task.steps_done))
        on_main(world, bad_files.write)  # rows written after the checkpoint belong to steps that are repeated

        # This rank's share of every batch that is left.
        mine = RankSlice(batch, self.share.start, self.share.stop)
        schedule = Schedule(order, mine, first_step=task.steps_done, last_step=task.total_steps)
        build = partial(build_loader, index, schedule, config.pipelines, config.augmentation, device=world.device)
        loader = on_all_ranks(world, partial(build, views=task.views, processes_here=world.local_world_size))
        if world.is_main:
            where = loader.settings.described
            log.info(
                "%d images, %d steps per epoch, %s on %s, %s",
                *(len(index), epoch_steps, where, world.device, task.precision),
            )
            task.log_start(index)
        self._take_steps(task, bad_files, index, loader)

    def _restore(self, task: Task[Any, Any], bad_files: BadFiles, path: Path, images: list[int]) -> None:
        """Load a checkpoint into a new task. The configuration goes on to name the weights that the run began with.

        Args:
            images: number of images of each source. They must be the same as before, since the order depends on them.

        Raises:
            UserError: the file cannot be read, or belongs to another dataset or model.
        """
        saved = load_checkpoint(path)
        if saved.get("images") != images:
            raise UserError(
                f"{path} is of a run on {saved.get('images')} images, and there are {images} now: restore the data, "
                f"or start a new run with --set run.out=..."
            )
        try:
            task.load_state_dict(saved)
            bad_files.load_state_dict(saved["bad_files"])
        except (LookupError, TypeError, ValueError, RuntimeError) as error:
            reason = f"{type(error).__name__}: {in_one_line(error)}"
            raise UserError(f"{path} does not fit this configuration's network and optimiser: {reason}") from error
        weights = saved["config"]["encoder"]["weights"]
        task.config = self.config = replace(self.config, encoder=replace(self.config.encoder, weights=weights))
        log.info("resuming after step %d from %s", task.steps_done, path)

    def _take_steps(self, task: Task[Any, Any], bad_files: BadFiles, index: Index, loader: Loader) -> None:
        """The loop: load, compute, log, save, and stop when the ranks agree."""
        config, world, folder = self.config, self.world, self.folder
        gc.freeze()  # the collector skips the objects that exist now, which stay until the end of the run
        about = {"config": to_dict(config), "images": index.counts}
        with (
            before_the_loader(world.device),
            loader,
            StopSignals() as stop,
            BackgroundWriter(folder.checkpoints, lambda: task.draw(folder)) as writer,
            Meter(config, folder, task, world, writer, task.title) as meter,
        ):

            def save() -> None:
                if world.is_main and task.steps_done > 0:
                    state = {**about, **task.state_dict(), "bad_files": bad_files.state_dict()}
                    writer.save(task.steps_done, state)

            def save_at_once() -> None:
                if world.is_main and task.weights_are_finite():
                    save()
                    writer.finish()
                    log.info("saved after step %d; --resume auto continues there", task.steps_done)

            batches = steps_of_all_ranks(world, stop, writer.check, meter.timed(loader))
            for batch in before_an_error(save_at_once, batches):
                if world.is_main and task.steps_done == 0:
                    save_views(folder.views_picture, batch, index)

                try:
                    result = task.step(batch.to(world.device))
                except torch.OutOfMemoryError as error:
                    error.add_note("Lower train.micro_batch, or in pre-training set train.recompute = 'always'")
                    raise
                bad_files.count(batch)

                done = task.steps_done
                last = done == task.total_steps
                stopping = stop.agreed or (world.world_size == 1 and stop.signal_number != 0)
                log_now = last or done % config.run.log_every == 0
                save_now = last or stopping or done % config.run.checkpoint_every == 0
                if log_now or save_now or task.validation_due:
                    # Waits for missing ranks with a time limit. What reads the GPU below would wait without one.
                    world.barrier()
                loss = None
                if log_now or save_now:
                    loss = on_all_ranks(world, partial(self._checked_loss, result, done, meter.lr))
                    bad_files.sum_ranks(loader.quarantine.reasons)
                too_many = (log_now or save_now) and bad_files.too_many
                meter.after_step(batch, result, loss if log_now else None)
                if task.validation_due:
                    if world.device.type == "cuda":
                        # Else the pause would begin before the GPU has finished the steps, and they would seem shorter.
                        torch.cuda.current_stream(world.device).synchronize()
                    with meter.paused():
                        meter.validated(task.validate(folder))
                if save_now or too_many:
                    on_all_ranks(world, partial(self._require_finite_weights, task))
                    save()
                if last or stopping or too_many:
                    on_all_ranks(world, writer.finish)
                    on_all_ranks(world, partial(bad_files.require_few, done))
                if stopping and not last:
                    raise Interrupted(stop.signal_number, done, folder.root)

    def _checked_loss(self, result: Result, step: int, lr: float) -> float:
        """The loss, if it is finite and the run's folder is still there."""
        if self.world.is_main and not self.folder.config_file.exists():
            raise MachineError(f"run.out = {self.folder.root} was removed or cannot be reached: stopped at step {step}")
        loss = result.loss.item()  # waits for the device
        if not math.isfinite(loss):  # the same on all ranks
            raise self._diverged(f"the loss is {loss}", step, lr)
        return loss

    def _require_finite_weights(self, task: Task[Any, Any]) -> None:
        """Weights that are not finite are never saved."""
        if not task.weights_are_finite():
            raise self._diverged("the weights are not finite", task.steps_done, task.lr)

    def _diverged(self, what: str, step: int, lr: float) -> UserError:
        return UserError(
            f"{what} at step {step}, learning rate {lr:.3g}; the last good checkpoint is "
            f"{self.folder.checkpoints.latest() or 'none'}. Lower optim.lr or raise optim.warmup_epochs"
        )


def before_an_error(act: Callable[[], None], batches: Iterable[B]) -> Iterator[B]:
    """Pass batches on. If there is none because of an error of all ranks, such as of many bad files, act before it."""
    try:
        yield from batches
    except (UserError, AnotherRankFailed):
        act()
        raise


def _require_same_configuration(world: World, config: object) -> None:
    """Ranks with other settings would wait for each other in vain, or train other weights without a message."""
    mine = dict(flatten(to_dict(config)))
    everybody = world.gather_objects(mine)
    for other in everybody:
        if (key := first_different_key(everybody[0], other, FREE_BETWEEN_RANKS)) is not None:
            remedy = "Start all ranks with the same files and options"
            require_same(world, f"values of {key}", repr(mine.get(key)), remedy)


@contextmanager
def before_the_loader(device: torch.device) -> Iterator[None]:
    """On a GPU, run the block on a stream of higher priority than the loader's, which has the lowest: torch's default.

    When a multiprocessor is free, it takes the next piece of the step's work before one of the loader's.
    """
    if device.type != "cuda":
        yield
        return
    stream = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream(device))
    try:
        with torch.cuda.stream(stream):
            yield
    finally:  # memory of this stream may be used again by the default one
        torch.cuda.current_stream(device).wait_stream(stream)


def set_threads(threads: int | None, world: World) -> None:
    """Set torch's CPU threads: as configured, but no more than cores, else this process's share of the cores.

    torchrun's default is one thread per process. A single process keeps torch's choice, limited by the quota of CPU
    time.
    """
    cores = available_cores()
    share = max(1, cores // world.local_world_size)
    usual = share if world.local_world_size > 1 else min(share, torch.get_num_threads())
    torch.set_num_threads(min(threads or usual, cores))  # more would wait for each other
