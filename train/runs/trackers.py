"""Trackers of experiments get a run's configuration, figures and pictures: TensorBoard, MLflow, Weights & Biases.

metrics.jsonl and validation.jsonl hold the figures even if a tracker fails.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
import queue
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from errors import UserError
from train.config.tables import flatten
from train.runs.folder import RunFolder
from writing import write_text

log = logging.getLogger(__name__)

_MOST_CALLS = 10_000
_PATIENCE_S = 30.0


class Tracker(Protocol):
    """The interface of a tracker. All methods are called in one thread, and each may raise any error.

    Attributes:
        id: identifies the tracker's record of this run, so that a resumed run continues it; None if not needed.
    """

    id: str | None

    def configuration(self, tables: Mapping[str, Any]) -> None:
        """Log the run's configuration, as nested tables. It is called again when the run is resumed."""

    def scalars(self, row: Mapping[str, float], step: int) -> None:
        """Log figures after `step` optimiser steps."""

    def picture(self, path: Path, step: int) -> None:
        """Log a picture. It replaces an earlier picture with this name."""

    def close(self) -> None:
        """End the record of the run."""


class TensorBoard:
    """Writes figures as event files into the run's folder."""

    id: str | None = None

    def __init__(self, folder: Path, first_step: int, _: str | None) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder / "tensorboard"), purge_step=first_step + 1)

    def configuration(self, tables: Mapping[str, Any]) -> None:
        """Do nothing: it is in the run's folder."""

    def scalars(self, row: Mapping[str, float], step: int) -> None:
        """Add a point to the curve of each name."""
        for name, value in row.items():
            self._writer.add_scalar(name, value, step)

    def picture(self, path: Path, step: int) -> None:
        """Do nothing: it is in the run's folder."""

    def close(self) -> None:
        """Write the remaining events."""
        self._writer.close()


class MLflow:
    """A run of MLflow. MLflow's environment variables, such as MLFLOW_TRACKING_URI, say where it is stored."""

    def __init__(self, folder: Path, _: int, run_id: str | None) -> None:
        self._mlflow = importlib.import_module("mlflow")
        self._is_new = run_id is None
        logging.getLogger("urllib3.connectionpool").addFilter(_is_no_retry)
        with _soon_given_up():
            self.id: str | None = self._mlflow.start_run(run_id=run_id, run_name=folder.name).info.run_id

    def configuration(self, tables: Mapping[str, Any]) -> None:
        """Log it as an artifact, and as parameters, which MLflow does not let a resumed run change."""
        self._mlflow.log_dict(dict(tables), "config.json")
        values = [(key, str(value)[:6000]) for key, value in flatten(tables)] if self._is_new else []
        for first in range(0, len(values), 100):  # more are refused at once
            self._mlflow.log_params(dict(values[first : first + 100]))

    def scalars(self, row: Mapping[str, float], step: int) -> None:
        """Log figures as metrics."""
        self._mlflow.log_metrics(dict(row), step=step)

    def picture(self, path: Path, step: int) -> None:
        """Log a picture as an artifact."""
        self._mlflow.log_artifact(str(path))

    def close(self) -> None:
        """Mark the run as finished."""
        self._mlflow.end_run()


def _is_no_retry(record: logging.LogRecord) -> bool:
    """Filter of log records: False for the warnings that repeat at each attempt to reach a server that is down."""
    return record.threadName != "mlflow"


@contextmanager
def _soon_given_up() -> Iterator[None]:
    """Let MLflow give up a server within seconds, unless the environment sets a limit. Later outages get minutes."""
    few = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2", "MLFLOW_HTTP_REQUEST_TIMEOUT": "10"}
    added = {name: value for name, value in few.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]


class WeightsAndBiases:
    """A run of Weights & Biases, set up by its environment variables, such as WANDB_PROJECT and WANDB_MODE."""

    def __init__(self, folder: Path, _: int, run_id: str | None) -> None:
        self._wandb = importlib.import_module("wandb")
        settings = self._wandb.setup().settings
        sends = settings.mode in ("online", "shared", "run")
        if sends and not self._wandb.login(host=settings.base_url, prompt=False, verify=False):
            raise UserError("no login: run 'wandb login' first, set WANDB_API_KEY, or set WANDB_MODE=offline")
        self._run = self._wandb.init(
            id=run_id,
            resume="allow",
            name=folder.name,
            dir=os.environ.get("WANDB_DIR", str(folder)),
            reinit="create_new",
            # The progress line stays ours. By default, W&B's process asks a server that is down for minutes.
            settings=self._wandb.Settings(console="off", x_graphql_retry_max=3),
        )
        self.id: str | None = self._run.id

    def configuration(self, tables: Mapping[str, Any]) -> None:
        """Log it as the run's config."""
        self._run.config.update(dict(tables), allow_val_change=True)

    def scalars(self, row: Mapping[str, float], step: int) -> None:
        """Log figures as a row of the history. W&B drops a row whose step is lower than that of an earlier row."""
        self._run.log(dict(row), step=step)

    def picture(self, path: Path, step: int) -> None:
        """Log a picture in a row of the history."""
        self._run.log({f"pictures/{path.stem}": self._wandb.Image(str(path))}, step=step)

    def close(self) -> None:
        """Send the remaining data."""
        self._run.finish()


TRACKERS: dict[str, Callable[[Path, int, str | None], Tracker]] = {
    "tensorboard": TensorBoard, "mlflow": MLflow, "wandb": WeightsAndBiases,
}  # fmt: skip
"""Name in `run.trackers` -> constructor, which takes the run's folder, the steps done so far, and the saved id."""


def require_installed(names: Sequence[str]) -> None:
    """Raise a `UserError` if the package of a tracker is missing. A package's extra has the same name."""
    for name in names:
        if getattr(importlib.util.find_spec(name), "origin", None) is None:  # a folder of that name is no package
            raise UserError(
                f'run.trackers has "{name}", and its package is not installed: install the extra by '
                f"'.venv/bin/uv pip install -r pyproject.toml --extra {name}', or take it out of run.trackers"
            )


class Trackers:
    """All trackers of a run, on rank 0.

    Each tracker works in its own thread, so that no step waits for a server. A tracker that fails or cannot keep up is
    dropped with one warning. It never ends the run.

    Args:
        names: keys of `TRACKERS`.
        tables: the run's configuration.
        first_step: steps already taken.
    """

    def __init__(self, names: Sequence[str], folder: RunFolder, tables: Mapping[str, Any], *, first_step: int) -> None:
        self._workers = [_Worker(name, folder, first_step) for name in dict.fromkeys(names)]
        self._each(lambda tracker: tracker.configuration(tables))
        self._step = first_step
        self._pictures = dict.fromkeys((folder.views_picture, folder.loss_picture, folder.predictions_picture), 0)

    def _each(self, call: Callable[[Tracker], None]) -> None:
        for worker in self._workers:
            worker.put(call)

    def scalars(self, row: Mapping[str, float], step: int) -> None:
        """Pass on figures after `step` optimiser steps, and the pictures that have changed."""
        self._step = step
        self._each(lambda tracker: tracker.scalars(row, step))
        self._show_pictures()

    def _show_pictures(self) -> None:
        step = self._step
        for path, shown_ns in self._pictures.items():
            changed_ns = path.stat().st_mtime_ns if path.exists() else 0
            if changed_ns != shown_ns:
                self._pictures[path] = changed_ns
                self._each(lambda tracker, path=path: tracker.picture(path, step))  # type: ignore[misc]

    def close(self) -> None:
        """Wait, for a limited time, until all trackers have finished."""
        self._show_pictures()
        for worker in self._workers:
            worker.put(None)
        for worker in self._workers:
            worker.wait()


class _Worker:
    """One tracker and its thread."""

    def __init__(self, name: str, folder: RunFolder, first_step: int) -> None:
        self._name, self._left_out = name, False
        self._calls: queue.Queue[Callable[[Tracker], None] | None] = queue.Queue(_MOST_CALLS)
        self._thread = threading.Thread(target=self._work, args=(folder, first_step), name=name, daemon=True)
        self._thread.start()

    def _work(self, folder: RunFolder, first_step: int) -> None:
        file = folder.root / f"tracker-{self._name}.txt"
        try:
            known = file.read_text().strip() if file.exists() else ""
            tracker = TRACKERS[self._name](folder.root, first_step, known or None)
            if tracker.id is not None:
                write_text(file, f"{tracker.id}\n")
            while (call := self._calls.get()) is not None:
                call(tracker)
            tracker.close()
        except BaseException as error:  # even SystemExit, which would end the thread without a word
            self._leave_out(" ".join(f"{type(error).__name__}: {error}".split())[:400])

    def put(self, call: Callable[[Tracker], None] | None) -> None:
        """Queue a call; None ends the thread."""
        try:
            self._calls.put_nowait(call)
        except queue.Full:
            self._leave_out(f"{_MOST_CALLS} calls are waiting for it")

    def wait(self) -> None:
        """Wait until all calls are done, the tracker is dropped, or the time limit passes."""
        if not self._left_out:
            self._thread.join(_PATIENCE_S)
        if self._thread.is_alive():
            self._leave_out(f"it did not finish within {_PATIENCE_S:g} s after the end of the run")

    def _leave_out(self, reason: str) -> None:
        if not self._left_out:
            log.warning('the tracker "%s" is dropped and the run continues: %s', self._name, reason)
        self._left_out = True
