"""Trackers of experiments get a run's configuration, figures and pictures: TensorBoard, MLflow, Weights & Biases.

metrics.jsonl and validation.jsonl hold the figures whatever becomes of a tracker.
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
    """What a tracker does; all of it is called in one thread, and anything may raise.

    Attributes:
        id: by which a resumed run finds what it began; None if it needs none.
    """

    id: str | None

    def configuration(self, tables: Mapping[str, Any]) -> None:
        """Take the run's configuration, as nested tables; again when the run is resumed."""

    def scalars(self, row: Mapping[str, float], step: int) -> None:
        """Take figures after `step` optimiser steps."""

    def picture(self, path: Path, step: int) -> None:
        """Logs a picture; replaces the one of the same name."""

    def close(self) -> None:
        """The run has ended."""


class TensorBoard:
    """Figures as event files in the run's folder."""

    id: str | None = None

    def __init__(self, folder: Path, first_step: int, _: str | None) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder / "tensorboard"), purge_step=first_step + 1)

    def configuration(self, tables: Mapping[str, Any]) -> None:
        """Leave it out: the run's folder has it."""

    def scalars(self, row: Mapping[str, float], step: int) -> None:
        """One curve for each name."""
        for name, value in row.items():
            self._writer.add_scalar(name, value, step)

    def picture(self, path: Path, step: int) -> None:
        """Leave it out: the run's folder has it."""

    def close(self) -> None:
        """Write what is left."""
        self._writer.close()


class MLflow:
    """One run of MLflow; where, MLflow's own environment says, such as MLFLOW_TRACKING_URI."""

    def __init__(self, folder: Path, _: int, run_id: str | None) -> None:
        self._mlflow = importlib.import_module("mlflow")
        self._is_new = run_id is None
        logging.getLogger("urllib3.connectionpool").addFilter(_is_no_retry)
        with _soon_given_up():
            self.id: str | None = self._mlflow.start_run(run_id=run_id, run_name=folder.name).info.run_id

    def configuration(self, tables: Mapping[str, Any]) -> None:
        """As an artifact; and as parameters, which cannot be changed when the run is resumed."""
        self._mlflow.log_dict(dict(tables), "config.json")
        values = [(key, str(value)[:6000]) for key, value in flatten(tables)] if self._is_new else []
        for first in range(0, len(values), 100):  # more are refused at once
            self._mlflow.log_params(dict(values[first : first + 100]))

    def scalars(self, row: Mapping[str, float], step: int) -> None:
        """As metrics."""
        self._mlflow.log_metrics(dict(row), step=step)

    def picture(self, path: Path, step: int) -> None:
        """As an artifact."""
        self._mlflow.log_artifact(str(path))

    def close(self) -> None:
        """Mark the run as finished."""
        self._mlflow.end_run()


def _is_no_retry(record: logging.LogRecord) -> bool:
    """Whether a record is not one of the warnings of each attempt to reach a server that is down."""
    return record.threadName != "mlflow"


@contextmanager
def _soon_given_up() -> Iterator[None]:
    """Give up a server within seconds, unless the environment says when. MLflow tries a later outage for minutes."""
    few = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2", "MLFLOW_HTTP_REQUEST_TIMEOUT": "10"}
    added = {name: value for name, value in few.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]


class WeightsAndBiases:
    """One run of Weights & Biases, as its own environment says, such as WANDB_PROJECT and WANDB_MODE."""

    def __init__(self, folder: Path, _: int, run_id: str | None) -> None:
        self._wandb = importlib.import_module("wandb")
        settings = self._wandb.setup().settings
        sends = settings.mode in ("online", "shared", "run")
        if sends and not self._wandb.login(host=settings.base_url, prompt=False, verify=False):
            raise UserError("no login: run 'wandb login' before, set WANDB_API_KEY, or set WANDB_MODE=offline")
        self._run = self._wandb.init(
            id=run_id,
            resume="allow",
            name=folder.name,
            dir=os.environ.get("WANDB_DIR", str(folder)),
            reinit="create_new",
            settings=self._wandb.Settings(console="off"),  # the progress line stays ours
        )
        self.id: str | None = self._run.id

    def configuration(self, tables: Mapping[str, Any]) -> None:
        """As the run's config."""
        self._run.config.update(dict(tables), allow_val_change=True)

    def scalars(self, row: Mapping[str, float], step: int) -> None:
        """As a row of the history; W&B drops steps that lie before its newest."""
        self._run.log(dict(row), step=step)

    def picture(self, path: Path, step: int) -> None:
        """As media of a row."""
        self._run.log({f"pictures/{path.stem}": self._wandb.Image(str(path))}, step=step)

    def close(self) -> None:
        """Send what is left."""
        self._run.finish()


TRACKERS: dict[str, Callable[[Path, int, str | None], Tracker]] = {
    "tensorboard": TensorBoard, "mlflow": MLflow, "wandb": WeightsAndBiases,
}  # fmt: skip
"""Makers by their names in `run.trackers`; each takes the run's folder, the steps done before, and the id it had."""


def require_installed(names: Sequence[str]) -> None:
    """A tracker whose package is missing is a `UserError`; the extras are called as the packages that they import."""
    for name in names:
        if getattr(importlib.util.find_spec(name), "origin", None) is None:  # a folder of that name is no package
            raise UserError(
                f'run.trackers has "{name}", and its package is not installed: install the extra by '
                f"'.venv/bin/uv pip install -r pyproject.toml --extra {name}', or take it out of run.trackers"
            )


class Trackers:
    """All trackers of a run, on rank 0.

    Each works in a thread of its own, so that no step waits for a server. One that fails or does not keep up is left
    out from there on, with one warning: a tracker never ends a run.

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
        """Hand over figures after `step` optimiser steps, and the pictures that have changed."""
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
        """Wait until all are done, for a limited time."""
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
            self._leave_out(f"{_MOST_CALLS} calls wait for it")

    def wait(self) -> None:
        """Waits until all calls are done, the tracker is dropped, or the time limit passes."""
        if not self._left_out:
            self._thread.join(_PATIENCE_S)
        if self._thread.is_alive():
            self._leave_out(f"at the end of the run it is not done within {_PATIENCE_S:g} s")

    def _leave_out(self, reason: str) -> None:
        if not self._left_out:
            log.warning('the tracker "%s" is left out from here on, the run goes on: %s', self._name, reason)
        self._left_out = True
