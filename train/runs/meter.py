"""Measures the training loop; writes metrics.jsonl, validation.jsonl, TensorBoard, the log and the progress line."""

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Generic, Protocol, TypeVar

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from torch import Tensor

from peclr_dali.pipelines.batch import Batch
from peclr_dali.train.distributed.world import on_all_ranks
from peclr_dali.train.runs.checkpointer import Checkpointer
from peclr_dali.train.runs.log import console, print_line
from peclr_dali.train.runs.run import AnyRun
from peclr_dali.train.steps.stopwatch import Stopwatch
from peclr_dali.train.steps.train_state import TrainState

R = TypeVar("R", bound="Result")


class Result(Protocol):
    """Result of a step, for the training loop."""

    @property
    def loss(self) -> Tensor:
        """Scalar, of the global batch, on the device."""


class Meter(AbstractContextManager["Meter[R]"], Generic[R]):
    """Measures the training loop. Rank 0 writes the metrics; with `run.log_samples`, each rank writes its samples.

    Args:
        own_work: times this rank's own work in a step, without waiting for other ranks.
        figures: the figures of a step's result for a row of metrics, besides the loss. It may wait for the device.
        title: of the progress line.
    """

    def __init__(
        self,
        run: AnyRun,
        state: TrainState,
        checkpointer: Checkpointer,
        own_work: Stopwatch,
        figures: Callable[[R], dict[str, float]],
        title: str,
    ) -> None:
        self._config, self._folder, self._world, self._state = run.config, run.folder, run.world, state
        self._checkpointer, self._own_work, self._figures = checkpointer, own_work, figures
        file = run.folder.root / f"samples-rank{run.world.rank}.jsonl"
        self._samples = file.open("a", buffering=1) if run.config.run.log_samples else None
        self._log = RunLog(run, state, title) if run.world.is_main else None
        self._waiting, self._saved_s = Stopwatch(), checkpointer.waited_s
        self._steps, self._since = 0, time.perf_counter()  # of the next row of metrics
        self._run_steps, self._run_since = 0, self._since  # of this process, without its first step

    def __exit__(self, *_: object) -> None:
        for file in (self._log, self._samples):
            if file is not None:
                file.close()

    def next_batch(self, batches: Iterator[Batch]) -> Batch:
        """Take a batch, and measure the time of waiting for it."""
        with self._waiting.running(self._world.device):
            return next(batches)

    def log(self, batch: Batch, result: R) -> None:
        """Count a step; if it is due, write a row of metrics, which waits for the device. All ranks call it together.

        Raises:
            UserError: the loss is not finite.
            MachineError: the folder has disappeared.
        """
        step = self._state.steps_done
        self._steps += 1
        self._run_steps += 1
        if self._run_steps == 1:  # it compiles, and measures memory
            self._run_since = time.perf_counter()
        if self._samples is not None:
            seen = {"step": step, "first": int(batch.positions[0]), "samples": batch.samples.tolist()}
            self._samples.write(json.dumps(seen) + "\n")
        if self._log is not None:
            self._log.advance(step)
        if step % self._config.run.log_every == 0 or self._state.is_finished:
            self._world.barrier()  # with a time limit, which waiting for the GPU has not
            with on_all_ranks(self._world):
                if self._world.is_main:
                    self._folder.require_there(step)
                loss = result.loss.item()  # waits for the device
                if not math.isfinite(loss):  # the same on all ranks
                    raise self._folder.diverged(f"the loss is {loss}", step, self._state.lr)
            self._write_row(step, loss, result, len(batch))

    def _write_row(self, step: int, loss: float, result: R, images: int) -> None:
        waited_s, passes_s, now = self._waiting.take_s(), self._own_work.take_s(), time.perf_counter()
        elapsed_s, saved_s = now - self._since, self._checkpointer.waited_s
        step_s = (now - self._run_since) / (self._run_steps - 1) if self._run_steps > 1 else elapsed_s / self._steps
        slowest = self._slowest(waited_s, passes_s, images)
        if self._log is not None:
            row = {
                "step": step,
                "epoch": step / (self._state.total_steps / self._config.train.epochs),
                "loss": loss,
                "lr": self._state.lr,
                "images_per_s": self._steps * self._config.train.batch / elapsed_s,
                "wait_share": waited_s / elapsed_s,
                "checkpoint_share": (saved_s - self._saved_s) / elapsed_s,
                **slowest,
                **self._figures(result),
                "eta_s": (self._state.total_steps - step) * step_s,
            }
            self._log.write(row)
        self._saved_s = saved_s
        self._steps, self._since = 0, time.perf_counter()

    def _slowest(self, waited_s: float, passes_s: float, images: int) -> dict[str, float]:
        """The rank with the longest own time per image of its share; empty for a single rank.

        Its own time is that of its passes and of waiting for its data, without waiting for other ranks. It is compared
        with the lower median.
        """
        if self._world.world_size == 1:
            return {}
        ranks = self._world.gather_objects(((passes_s + waited_s) / images, waited_s / self._steps))
        times = [image_s for image_s, _ in ranks]
        return {
            "slowest_rank": times.index(max(times)),
            "slowest_over_median": max(times) / max(sorted(times)[(len(times) - 1) // 2], 1e-12),
            "wait_s_max": max(wait_s for _, wait_s in ranks),
        }

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Exclude the `with` block from the time of the steps. Waits for all ranks and for the device first."""
        self._world.barrier()  # with a time limit, which waiting for the GPU has not
        if self._world.device.type == "cuda":
            # Else the pause would begin before the GPU has finished the steps, and they would seem shorter.
            torch.cuda.current_stream(self._world.device).synchronize()
        start = time.perf_counter()
        yield
        pause_s = time.perf_counter() - start
        self._since += pause_s
        self._run_since += pause_s

    def log_validation(self, row: Mapping[str, float]) -> None:
        """Write the metrics of a validation."""
        if self._log is not None:
            self._log.write_validation(row)


class RunLog:
    """Log of rank 0."""

    def __init__(self, run: AnyRun, state: TrainState, title: str) -> None:
        self._metrics = run.folder.metrics_file.open("a", buffering=1)
        self._validation_file = run.folder.validation_file
        self._board = None
        if run.config.run.tensorboard:
            from torch.utils.tensorboard import SummaryWriter  # importing it takes a second

            self._board = SummaryWriter(str(run.folder.root / "tensorboard"), purge_step=state.steps_done + 1)
        self._total = state.total_steps
        self._fastest, self._told_slow = 0.0, False  # images/s of the fastest row; whether a slow one was told
        columns = (
            TextColumn(title), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[status]}"),
            TimeElapsedColumn(), TextColumn("{task.fields[eta]}"),
        )  # fmt: skip
        self._progress = Progress(*columns, console=console, disable=not console.is_terminal)
        self._task = self._progress.add_task("steps", total=self._total, completed=state.steps_done, status="", eta="")
        self._progress.start()

    def close(self) -> None:
        """End the progress line, TensorBoard's file and the log."""
        self._progress.stop()
        if self._board is not None:
            self._board.close()
        self._metrics.close()

    def advance(self, step: int) -> None:
        """Move the progress line."""
        self._progress.update(self._task, completed=step)

    def write(self, row: Mapping[str, float]) -> None:
        """Write a row of metrics.jsonl: step, epoch, loss, lr, images_per_s, wait_share, checkpoint_share, eta_s...

        The first one that is ten times slower than the fastest gets a line.
        """
        self._metrics.write(json.dumps(row) + "\n")
        self._plot(row)
        minutes, seconds = divmod(round(row["eta_s"]), 60)
        eta = f"ETA {minutes}:{seconds:02}"
        status = (
            f"epoch {row['epoch']:.1f}  loss {row['loss']:.3f}  lr {row['lr']:.2e}  "
            f"{row['images_per_s']:.0f} images/s  waited {row['wait_share']:.1%}"
        )
        self._progress.update(self._task, status=status, eta=eta)
        if not console.is_terminal:
            print_line(f"step {row['step']}/{self._total}  {status}  {eta}")
        images_per_s = row["images_per_s"] / max(1 - row["checkpoint_share"], 1e-3)  # without waiting for checkpoints
        self._fastest = max(self._fastest, images_per_s)
        if images_per_s < self._fastest / 10 and not self._told_slow:
            self._told_slow = True
            print_line(
                f"step {row['step']}/{self._total}  steps take {self._fastest / images_per_s:.0f} times as long as the "
                "fastest: do other processes use these cores (train.threads), or do images come slowly (waited)?"
            )

    def write_validation(self, row: Mapping[str, float]) -> None:
        """Write a row of validation.jsonl, and print its errors beside those of a constant prediction, if known."""
        with self._validation_file.open("a") as file:
            file.write(json.dumps(row) + "\n")
        self._plot(row, "validation/")
        print_line(f"step {row['step']}/{self._total}  held out: {errors_in_words(row)}")

    def _plot(self, row: Mapping[str, float], prefix: str = "") -> None:
        """Add a point to TensorBoard's curve of each name."""
        if self._board is not None:
            for name in row.keys() - {"step"}:
                self._board.add_scalar(prefix + name, row[name], int(row["step"]))


def errors_in_words(row: Mapping[str, float]) -> str:
    """The errors of a validation that are known, beside those of a constant prediction."""
    shown = []
    for key, name, unit in (("epe_cm", "EPE", "cm"), ("pa_epe_cm", "PA-EPE", "cm"), ("epe_px", "2D EPE", "px"),
                            ("epe_px_of_224", "2D EPE", "px of 224")):  # fmt: skip
        if not math.isnan(row.get(key, math.nan)):
            constant = row.get(f"constant_{key}")
            shown.append(f"{name} {row[key]:.2f} {unit}" + (f" (a constant: {constant:.2f})" if constant else ""))
    return ", ".join(shown)
