"""The training loop, shared by pre-training and fine-tuning."""

import gc
import logging
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol, TypeVar

import torch

from peclr_dali.errors import UserError, as_size, in_one_line
from peclr_dali.pipelines.batch import Batch
from peclr_dali.pipelines.loader.loader import Loader
from peclr_dali.pipelines.samples.index import Index
from peclr_dali.train.distributed.interrupt import Interrupted, StopSignals
from peclr_dali.train.distributed.world import on_all_ranks
from peclr_dali.train.runs.bad_files import BadFiles
from peclr_dali.train.runs.checkpointer import Checkpointer
from peclr_dali.train.runs.meter import Meter, Result
from peclr_dali.train.runs.pictures import save_views
from peclr_dali.train.runs.run import AnyRun
from peclr_dali.train.steps.train_state import TrainState

log = logging.getLogger(__name__)

R = TypeVar("R", bound=Result)

LESS_MEMORY = "Lower train.micro_batch, or in pre-training set train.recompute = 'always'"


class Validator(Protocol):
    """Measures a network in training."""

    def should_validate(self, step: int) -> bool:
        """Whether to validate after so many steps; the same on all ranks."""

    def validate(self, step: int) -> dict[str, float]:
        """The row for validation.jsonl, the same on all ranks, which call it together."""


def train(
    run: AnyRun,
    index: Index,
    state: TrainState,
    step: Callable[[Batch], R],
    loader: Loader,
    validator: Validator,
    checkpointer: Checkpointer,
    bad_files: BadFiles,
    meter: Meter[R],
    stop: StopSignals,
) -> None:
    """Take the steps that are left.

    Args:
        step: takes this rank's share of a batch, on its device; writes the gradient of the whole batch to `.grad`,
            scaled by the state's scaler.

    Raises:
        UserError: the loss or the weights are not finite, or too many files are bad.
        Interrupted: a signal of `StopSignals` came; the state is saved.
    """
    gc.freeze()  # the collector skips the objects that exist now, which stay until the end of the run
    world, batches = run.world, iter(loader)
    with before_the_loader(world.device):
        while True:
            # Errors and signals of all ranks, by a few bytes between the hosts, without waiting for a GPU.
            with checkpointer.saved_before_errors(), on_all_ranks(world, stop):
                checkpointer.raise_failure()
                batch = meter.next_batch(batches)
            if world.is_main and state.steps_done == 0:
                save_views(run.folder.views_picture, batch, index)
            try:
                result = step(batch.to(world.device))
            except torch.OutOfMemoryError as error:
                error.add_note(LESS_MEMORY)
                raise
            state.update()
            bad_files.count(batch, state.steps_done)
            meter.log(batch, result)
            if validator.should_validate(state.steps_done):
                with meter.paused():
                    row = validator.validate(state.steps_done)
                meter.log_validation(row)
            checkpointer.save(result.loss)
            if state.is_finished or stop.agreed or bad_files.too_many:
                break
        checkpointer.save(result.loss, at_once=True)
        with on_all_ranks(world):
            bad_files.require_few(state.steps_done)
        if not state.is_finished:
            raise Interrupted(stop.signal_number, state.steps_done, run.folder.root)


def check_first_step(run: AnyRun, state: TrainState, step: Callable[[Batch], R], loader: Loader) -> None:
    """Take the step that comes first, with its batch, but do not update the weights, and write nothing.

    Args:
        step: see `train`.

    Raises:
        UserError: the step does not fit into the GPU's memory, or its loss is not finite.
    """
    world = run.world
    try:
        with loader, before_the_loader(world.device):
            loss = step(next(iter(loader)).to(world.device)).loss.item()
    except torch.OutOfMemoryError as error:
        raise UserError(f"the first step needs more memory: {in_one_line(error, 300)} {LESS_MEMORY}") from error
    if not math.isfinite(loss):
        raise run.folder.diverged(f"the loss is {loss}", state.steps_done + 1, float(state.scheduler.get_last_lr()[0]))
    on_gpu = world.device.type == "cuda"
    memory = f", {as_size(torch.cuda.max_memory_allocated())} of the GPU's memory at most" if on_gpu else ""
    log.info("ready: loss %.3f in step %d%s; nothing is saved", loss, state.steps_done + 1, memory)


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
