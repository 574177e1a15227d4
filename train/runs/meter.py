"""Measures the training loop and writes the metrics."""

from __future__ import annotations

import json
import logging
import math
import platform
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from peclr_dali.errors import UserError
from peclr_dali.pipelines.batch import Batch
from peclr_dali.pipelines.loader import Loader
from peclr_dali.train.config.finetuning import FinetuneConfig
from peclr_dali.train.config.pretraining import Config
from peclr_dali.train.distributed.world import World
from peclr_dali.train.runs.checkpoint import BackgroundWriter, not_written
from peclr_dali.train.runs.folder import RunFolder
from peclr_dali.train.runs.log import RunLog
from peclr_dali.train.steps.stopwatch import Stopwatch
from peclr_dali.train.steps.training_state import Result, TrainingState

log = logging.getLogger(__name__)

_INTERVALS = 3  # in a row, in which a rank must be slow to be reported


@dataclass(frozen=True)
class RankTime:
    """Time of one rank per step, without waiting for other ranks.

    Attributes:
        host: its machine.
        images: its share of the batch; shares may differ by a micro-batch.
        passes_s: seconds of its forward and backward passes.
        waited_s: seconds of waiting for its data.
    """

    host: str
    images: int
    passes_s: float
    waited_s: float

    @property
    def image_s(self) -> float:
        """Seconds per image of its share."""
        return max((self.passes_s + self.waited_s) / self.images, 1e-12)


def slowest_rank(ranks: Sequence[RankTime]) -> tuple[int, float]:
    """The rank with the longest own time per image, and the ratio of this time to the lower median."""
    times = [time_.image_s for time_ in ranks]
    rank = max(range(len(times)), key=times.__getitem__)
    return rank, times[rank] / sorted(times)[(len(times) - 1) // 2]


class Straggler:
    """Reports a rank that slows the others down clearly in several log intervals in a row.

    A single slow interval is not reported.
    """

    def __init__(self) -> None:
        self._rank, self._times = -1, 0

    def seen(self, ranks: Sequence[RankTime], step_s: float) -> str | None:
        """Take the mean times of a log interval: those of each rank, and that of a step.

        Returns a line when the same rank was clearly slower in `_INTERVALS` intervals, and nothing more until it has
        caught up.
        """
        rank, ratio = slowest_rank(ranks)
        slow = ranks[rank]
        behind_s = (slow.passes_s + slow.waited_s) * (1 - 1 / ratio)
        if behind_s <= 0.1 * step_s:
            self._rank, self._times = -1, 0
            return None
        self._rank, self._times = rank, self._times + 1 if rank == self._rank else 1
        if self._times != _INTERVALS:
            return None
        return (
            f"rank {rank} on {slow.host} slows the others down: {ratio:.1f} x the median time per image; per step "
            f"{slow.passes_s:.3f} s of computing and {slow.waited_s:.3f} s of waiting for data"
        )


class Meter:
    """Measures the training loop and writes the metrics."""

    def __init__(
        self,
        config: Config | FinetuneConfig,
        folder: RunFolder,
        state: TrainingState[Any, Any],
        world: World,
        *,
        writer: BackgroundWriter,
        title: str,
    ) -> None:
        self._config, self._folder, self._state, self._world = config, folder, state, world
        file = folder.root / f"samples-rank{world.rank}.jsonl"
        self._samples = file.open("a", buffering=1) if config.run.log_samples else None
        first, total = state.steps_done, state.total_steps
        self._log = RunLog(config, folder, title, first_step=first, total_steps=total) if world.is_main else None
        self._writer, self._saved_s = writer, writer.waited_s
        self._waiting, self._steps, self._since = Stopwatch(), 0, time.perf_counter()
        self._straggler = Straggler()
        self._error: OSError | None = None
        self._lr, self._loss = state.lr, math.nan

    def __enter__(self) -> Meter:
        return self

    def __exit__(self, *_: object) -> None:
        for file in (self._log, self._samples):
            if file is not None:
                with suppress(OSError):  # what a full disk refused is still in the files' buffers, and was reported
                    file.close()

    def check(self) -> None:
        """Raise a `UserError`, once, if this rank could not write a checkpoint or a log. Does not wait."""
        self._writer.check()
        error, self._error = self._error, None
        if error is not None:
            newest = self._folder.checkpoints.latest() or "none"
            what = f"the logs of run.out = {self._folder.root} cannot be written"
            raise not_written(what, error, f"; the newest checkpoint is {newest}") from error

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Keep an OSError of the block until `check` raises it before the next step. So no rank waits for this one."""
        try:
            yield
        except OSError as error:
            self._error = self._error or error

    def timed(self, loader: Loader) -> Iterator[Batch]:
        """Yield the loader's batches and measure the time of waiting for each."""
        batches = iter(loader)
        while True:
            with self._waiting.running(self._world.device):
                batch = next(batches, None)
            if batch is None:
                return
            self._lr = self._state.lr
            yield batch

    def after_step(self, batch: Batch, result: Result, *, log_now: bool) -> None:
        """Count a step. With `log_now`, write a row of metrics, which waits for the device.

        The row has the loss that `require_finite_loss` has read.
        """
        self._steps += 1
        step = self._state.steps_done
        if self._samples is not None:
            seen = {"step": step, "first": int(batch.positions[0]), "samples": batch.samples[:, 0].tolist()}
            if len(batch.images) > len(batch):
                seen["partners"] = batch.partners.tolist()
            with self.writing():
                self._samples.write(json.dumps(seen) + "\n")
        if self._log is not None:
            self._log.advance(step)
        if not log_now:
            return
        waited_s, passes_s = self._waiting.take_s(), self._state.own_work.take_s()
        elapsed_s = time.perf_counter() - self._since
        mine = RankTime(platform.node(), len(batch), passes_s / self._steps, waited_s / self._steps)
        slowest = self._slowest(mine)
        if self._log is not None:
            row = {
                "step": step,
                "epoch": step / (self._state.total_steps / self._config.train.epochs),
                "loss": self._loss,
                "lr": self._lr,
                "images_per_s": self._steps * self._config.train.batch / elapsed_s,
                "wait_share": waited_s / elapsed_s,
                "checkpoint_share": (self._writer.waited_s - self._saved_s) / elapsed_s,
                **slowest,
                **self._state.figures(result),
                "eta_s": (self._state.total_steps - step) * elapsed_s / self._steps,
            }
            with self.writing():
                self._log.write(row)
        self._saved_s = self._writer.waited_s
        self._steps, self._since = 0, time.perf_counter()

    def _slowest(self, mine: RankTime) -> dict[str, float]:
        """Figures about the slowest rank; empty for a single rank. Logs a rank that is clearly slower."""
        if self._world.world_size == 1:
            return {}
        ranks = self._world.gather_objects(mine)
        rank, ratio = slowest_rank(ranks)
        warning = self._straggler.seen(ranks, (time.perf_counter() - self._since) / self._steps)
        if self._world.is_main and warning is not None:
            log.warning(warning)
        return {
            "slowest_rank": rank,
            "slowest_over_median": ratio,
            "wait_s_max": max(other.waited_s for other in ranks),
        }

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Exclude the `with` block from the time of the steps."""
        start = time.perf_counter()
        yield
        self._since += time.perf_counter() - start

    def validated(self, row: Mapping[str, float] | None) -> None:
        """Write the metrics of a validation, if there was one."""
        if self._log is not None and row is not None:
            with self.writing():
                self._log.write_validation(row)

    def require_finite_loss(self, result: Result) -> None:
        """Raise a `UserError` if the loss is not finite; it is the same on all ranks."""
        self._loss = result.loss.item()
        if not math.isfinite(self._loss):
            raise self._diverged(f"the loss is {self._loss}", self._lr)

    def require_finite_weights(self) -> None:
        """Raise a `UserError` if a weight is not finite. Such weights are never saved."""
        if not self._state.weights_are_finite():
            raise self._diverged("the weights are not finite", self._state.lr)

    def _diverged(self, what: str, lr: float) -> UserError:
        return UserError(
            f"{what} at step {self._state.steps_done}, learning rate {lr:.3g}; the last good checkpoint is "
            f"{self._folder.checkpoints.latest() or 'none'}. Lower optim.lr or raise optim.warmup_epochs"
        )
