"""Decides when a run's checkpoints are saved and what is in them, writes them in a thread, and restores them."""

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

from peclr_dali.errors import UserError, in_one_line
from peclr_dali.pipelines.samples.index import Index
from peclr_dali.train.config.load import to_dict
from peclr_dali.train.distributed.world import on_all_ranks
from peclr_dali.train.runs.bad_files import BadFiles
from peclr_dali.train.runs.checkpoint import load_checkpoint
from peclr_dali.train.runs.folder import RunFolder
from peclr_dali.train.runs.run import AnyRun
from peclr_dali.train.steps.train_state import TrainState

log = logging.getLogger(__name__)


class Part(Protocol):
    """A part of a run that checkpoints hold."""

    def state_dict(self) -> dict[str, Any]:
        """Its entries of a checkpoint: tensors and plain values."""

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Load its entries of a checkpoint."""


class Checkpointer(AbstractContextManager["Checkpointer"]):
    """Saves a run's checkpoints in a thread, so that training waits only for a copy of the state.

    Only one is written at a time: the next one, and the end of the `with` block, wait for it. Rank 0 writes; all ranks
    call the methods together.

    Args:
        bad_files: its counts are summed before they are saved, but for a save before an error.
        parts: further parts that the checkpoints hold.
        draw: draws the curves of a run's folder; called in the thread after each checkpoint. If it fails, a warning
            says so.

    Attributes:
        waited_s: seconds that training has waited.
    """

    def __init__(
        self,
        run: AnyRun,
        index: Index,
        state: TrainState,
        bad_files: BadFiles,
        *parts: Part,
        draw: Callable[[RunFolder], None],
    ) -> None:
        self._folder, self._world, self._every = run.folder, run.world, run.config.run.checkpoint_every
        self._state, self._bad_files, self._draw = state, bad_files, draw
        self._parts: Sequence[Part] = (state, bad_files, *parts)
        self._about = {"config": to_dict(run.config), "images": index.counts}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._written: Future[None] | None = None
        self._saved_step, self.waited_s = state.steps_done, 0.0

    def __exit__(self, *_: object) -> None:
        self._thread.shutdown()

    def save(self, loss: Tensor, *, at_once: bool = False) -> None:
        """Save a checkpoint if it is due, and, with `at_once`, now, and wait until it is written.

        Args:
            loss: of the newest step. If it or the weights are not finite, nothing is saved.

        Raises:
            UserError: the loss or the weights are not finite.
            MachineError: the folder has disappeared.
            OSError: the checkpoint cannot be written.
        """
        step = self._state.steps_done
        if step != self._saved_step and (at_once or step % self._every == 0):
            self._world.barrier()  # with a time limit, which waiting for the GPU has not
            with on_all_ranks(self._world):
                if self._world.is_main:
                    self._folder.require_there(step)
                if not (bool(loss.isfinite()) and self._state.weights_are_finite()):
                    raise self._folder.diverged("the loss or the weights are not finite", step, self._state.lr)
            self._bad_files.sum_ranks()
            self._begin_write()
        if at_once:
            with on_all_ranks(self._world):
                self._finish_write()

    @contextmanager
    def saved_before_errors(self) -> Iterator[None]:
        """If the block ends with an error of all ranks, such as of many bad files, save before it is raised."""
        try:
            yield
        except UserError:
            step = self._state.steps_done
            if self._world.is_main and step > self._saved_step and self._state.weights_are_finite():
                self._begin_write()
                self._finish_write()
                log.info("saved after step %d; --resume auto continues there", step)
            raise

    def raise_failure(self) -> None:
        """Raise the error of a checkpoint that could not be written, once. Does not wait."""
        if self._written is not None and self._written.done():
            written, self._written = self._written, None
            written.result()

    def _begin_write(self) -> None:
        """On rank 0, copy the state and write it in the thread, unless the previous write failed."""
        start, self._saved_step = time.perf_counter(), self._state.steps_done
        if self._world.is_main and (self._written is None or self._written.exception() is None):
            content: dict[str, Any] = dict(self._about)
            for part in self._parts:
                content |= part.state_dict()
            content, when_copied = copy_to_host(content), None
            if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
                when_copied = torch.cuda.current_stream().record_event()  # type: ignore[no-untyped-call]
            self._written = self._thread.submit(self._write, self._saved_step, content, when_copied)
        self.waited_s += time.perf_counter() - start

    def _finish_write(self) -> None:
        if self._written is not None:
            wait([self._written])
        self.raise_failure()

    def _write(self, step: int, content: Mapping[str, Any], when_copied: torch.cuda.Event | None) -> None:
        if when_copied is not None:
            when_copied.synchronize()
        self._folder.checkpoints.save(step, content)
        try:
            self._draw(self._folder)
        except Exception as error:  # no picture is worth a run
            log.warning("the curves cannot be drawn after step %d: %s", step, in_one_line(error))


def copy_to_host(value: Any) -> Any:
    """Copy a tree of dicts, lists and tensors to the CPU.

    Copies from a GPU are only queued, after the step that made the tensors and before the next one.
    """
    if isinstance(value, Tensor):
        if value.device.type == "cpu":
            return value.detach().clone()
        return torch.empty_like(value, device="cpu", pin_memory=True).copy_(value.detach(), non_blocking=True)
    if isinstance(value, Mapping):
        return {key: copy_to_host(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(copy_to_host(item) for item in value)
    return value


def resume_or_claim(run: AnyRun, index: Index, state: TrainState, bad_files: BadFiles, *parts: Part) -> bool:
    """Restore the checkpoint, if there is one, and prepare the folder, unless the run is only checked.

    Returns whether steps are left.

    Args:
        parts: further parts that the checkpoints hold.

    Raises:
        UserError: the checkpoint cannot be read, or belongs to another dataset or model.
    """
    if run.checkpoint is not None:
        with on_all_ranks(run.world):
            all_parts: Sequence[Part] = (state, bad_files, *parts)
            saved = load_checkpoint(run.checkpoint)
            if saved.get("images") != index.counts:  # of each source: the order depends on it
                raise UserError(
                    f"{run.checkpoint} is of a run on {saved.get('images')} images, and there are {index.counts} now: "
                    "restore the data, or start a new run with --set run.out=..."
                )
            try:
                for part in all_parts:
                    part.load_state_dict(saved)
            except (LookupError, TypeError, ValueError, RuntimeError) as error:
                raise UserError(
                    f"{run.checkpoint} does not fit this configuration's network and optimiser: "
                    f"{type(error).__name__}: {in_one_line(error)}"
                ) from error
            log.info("resuming after step %d from %s", saved["step"], run.checkpoint)
    if state.is_finished:
        log.info("%s has finished its %d steps already", run.folder.root, state.total_steps)
        return False
    with on_all_ranks(run.world):
        if run.world.is_main and not run.check:  # not before: a run that could not start must leave no files
            run.folder.claim(run.config, state.steps_done)
            bad_files.write()  # rows written after the checkpoint belong to steps that are repeated
    return True
