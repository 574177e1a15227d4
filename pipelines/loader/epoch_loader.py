"""`EpochLoader`: one epoch of batches in each `for` loop, for a user's own training loop."""

import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Integral
from typing import Any, NoReturn

import torch

from peclr_dali.bounds import LARGEST_COUNT
from peclr_dali.errors import UserError
from peclr_dali.pipelines.batch import Batch
from peclr_dali.pipelines.config import PipelinesConfig
from peclr_dali.pipelines.loader.loader import Loader, build_loader
from peclr_dali.pipelines.loader.quarantine import Quarantine
from peclr_dali.pipelines.samples.index import Index
from peclr_dali.pipelines.samples.order import RankSlice, Schedule, build_order, steps_per_epoch
from peclr_dali.pipelines.views.augmentation import Augmentation


def whole_number(name: str, number: Any, least: int, largest: int = LARGEST_COUNT) -> int:
    """The number as Python's: NumPy's would overflow, and be rounded beside others.

    Raises:
        UserError: it is no whole number from `least` to `largest`.
    """
    if isinstance(number, bool) or not isinstance(number, Integral) or not least <= int(number) <= largest:
        raise UserError(f"{name} = {number!r}: expected a whole number from {least} to {largest}")
    return int(number)


class EpochLoader:
    """Yields one epoch of batches in each `for` loop. `make_loader` makes it.

    A `for` loop yields the current epoch: all of it, or its rest after `load_state_dict`. If a loop is left early, the
    next loop begins the next epoch. Batches are prepared ahead, also across epochs, until `close`, the end of a `with`
    block or the end of the process.

    Args:
        index: the samples.
        rows: the rows of each batch that this rank loads.
        batch: samples in a step, over all ranks.
        seed: seed of the order and of all draws.
        config: how views are made.
        augmentations: of each view.
        device: device of the batches.
        processes_here: processes that share this machine's cores.

    Attributes:
        index: the samples; `batch.samples` are its rows.
        device: device of the batches.
        quarantine: the files found so far that cannot be used.

    Raises:
        UserError: there are fewer samples than a batch.
    """

    def __init__(
        self,
        index: Index,
        rows: range,
        *,
        batch: int,
        seed: int,
        config: PipelinesConfig,
        augmentations: Sequence[Augmentation],
        device: torch.device,
        processes_here: int,
    ) -> None:
        self._steps = steps_per_epoch(index, batch, table="")
        self.index, self.quarantine, self.device = index, Quarantine(), device
        self._schedule = Schedule(build_order(index, batch=batch, seed=seed), RankSlice(batch, rows.start, rows.stop))
        self._config, self._augmentations, self._processes_here = config, augmentations, processes_here
        self._data: dict[str, Any] = {"batch": int(batch), "seed": int(seed), "images": index.counts}  # may be NumPy's
        self._step = 0  # of the run, the next to be handed out
        self._pass: object | None = None  # the one that is under way
        self._running: _Running | None = None

    def __len__(self) -> int:
        """Batches of an epoch, the same on all ranks."""
        return self._steps

    def __iter__(self) -> Iterator[Batch]:
        """Yield the batches of this rank to the end of the epoch. Loading begins when the first is requested.

        Raises:
            UserError: so many files are bad that a batch cannot be filled.
            RuntimeError: another `for`, `set_epoch` or `load_state_dict` has changed the position meanwhile, or this is
                a forked process.
        """
        if self._pass is not None:  # one before was left early
            self._step = -(-self._step // self._steps) * self._steps
        this = self._pass = object()
        end = (self.epoch + 1) * self._steps
        while self._step < end:
            batch = self._next()
            self._step += 1  # directly before the yield, so that Ctrl-C cannot come between the two
            yield batch
            del batch  # its memory may be used again
            if self._pass is not this:
                raise RuntimeError("the loader's position has changed since this batch: start another `for`")
        self._pass = None

    def _next(self) -> Batch:
        """The batch of the current step. It was prepared ahead if this step follows the previous one."""
        if self._running is None or self._running.step != self._step:
            self.close()
            loader = build_loader(
                self.index,
                replace(self._schedule, first_step=self._step),
                self._config,
                self._augmentations,
                device=self.device,
                processes_here=self._processes_here,
                quarantine=self.quarantine,
            )
            self._running = _Running(self._step, iter(loader), weakref.finalize(self, _finish, loader))
        try:
            batch = next(self._running.batches).to(self.device)
            self._running.step += 1
        except BaseException:
            self.close()
            raise
        return batch

    @property
    def epoch(self) -> int:
        """The epoch of the next batch."""
        return self._step // self._steps

    def set_epoch(self, epoch: int) -> None:
        """Let the next `for` yield this epoch: all of it, or the rest after a loaded state in this epoch.

        Raises:
            UserError: the epoch is negative, or not a whole number.
        """
        epoch = whole_number("epoch", epoch, 0)
        if self._pass is not None or epoch != self.epoch:
            self._step, self._pass = epoch * self._steps, None

    @property
    def sampler(self) -> "EpochLoader":
        """The object whose `set_epoch` frameworks call, as they do with a DataLoader's DistributedSampler."""
        return self

    def state_dict(self) -> dict[str, Any]:
        """The loader's position, the same on all ranks and for any number of ranks. Batches made ahead do not count.

        Returns:
            Plain values. "position": images that all ranks together have received since the beginning of epoch 0.
        """
        return {"position": self._step * self._data["batch"], **self._data}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next `for` continue at the position of `state`, also with another number of ranks.

        Raises:
            UserError: the state was saved with another batch, seed or number of images, so with another order; or it is
                no loader's state.
        """
        data = {key: state.get(key) for key in self._data} if isinstance(state, Mapping) else state
        if data != self._data:
            raise UserError(
                f"the loader's state is of {data!r}, expected {self._data}, as state_dict() gave it: give the loader "
                "the same arguments"
            )
        position = state.get("position")
        step, rest = divmod(position, self._data["batch"]) if isinstance(position, Integral) else (-1, 0)
        if not 0 <= step <= LARGEST_COUNT or rest:
            raise UserError(f"the loader's state has position {position!r}, expected a multiple of the batch")
        self._step, self._pass = step, None

    def close(self) -> None:
        """Stop preparing batches and free their memory. The next `for` starts again."""
        if self._running is not None:
            self._running.close()
            self._running = None

    def __enter__(self) -> "EpochLoader":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __reduce__(self) -> NoReturn:
        raise TypeError("a loader cannot be copied or sent to another process: call make_loader there")


@dataclass
class _Running:
    """A running loader: the step of its next batch, its batches, and the function that stops it."""

    step: int
    batches: Iterator[Batch]
    close: Callable[[], object]


def _finish(loader: Loader) -> None:
    """Stop a loader: in `close`, at the end of the process, or, in any thread, when its owner is garbage-collected."""
    if threading.current_thread() is threading.main_thread():
        loader.close()
    else:  # it may be one of the loader's own, which cannot wait for itself
        loader.stop()
