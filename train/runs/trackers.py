"""Trackers of experiments get a run's configuration, figures and pictures: TensorBoard, MLflow, Weights & Biases.

metrics.jsonl and validation.jsonl hold the figures even if a tracker fails. Each library sends figures in threads or a
process of its own, so that no step waits for a server.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from peclr_dali.errors import UserError
from peclr_dali.errors.terminal import in_one_line
from peclr_dali.train.config.tables import flatten
from peclr_dali.train.runs.folder import RunFolder
from peclr_dali.writing import write_text

log = logging.getLogger(__name__)

_PATIENCE_S = 30.0
"""Seconds that the end of a run waits for Weights & Biases."""


class Tracker:
    """The interface of a tracker, which does nothing. Each method may raise any error.

    Attributes:
        id: identifies the tracker's record of this run, so that a resumed run continues it; None if not needed.
    """

    id: str | None = None

    def configuration(self, tables: Mapping[str, Any]) -> None:
        """Log the run's configuration, as nested tables. It is called again when the run is resumed."""

    def scalars(self, row: Mapping[str, float], step: int) -> None:
        """Log figures after `step` optimiser steps."""

    def picture(self, path: Path, step: int) -> None:
        """Log a picture. It replaces an earlier picture with this name."""

    def close(self) -> None:
        """End the record of the run."""


class TensorBoard(Tracker):
    """Writes figures as event files into the run's folder, which has configuration and pictures already."""

    def __init__(self, folder: Path, first_step: int, _: str | None) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder / "tensorboard"), purge_step=first_step + 1)

    def scalars(self, row: Mapping[str, float], step: int) -> None:
        """Add a point to the curve of each name."""
        for name, value in row.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Write the remaining events."""
        self._writer.close()


class MLflow(Tracker):
    """A run of MLflow. MLflow's environment variables, such as MLFLOW_TRACKING_URI, say where it is stored.

    MLflow sends figures in its own threads. Other calls wait for the server: at the start, and for the pictures at the
    end. Unless the environment says otherwise, MLflow gives a server up within half a minute.
    """

    def __init__(self, folder: Path, _: int, run_id: str | None) -> None:
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
        logging.getLogger("urllib3.connectionpool").setLevel(logging.ERROR)  # a warning for each attempt
        self._mlflow = importlib.import_module("mlflow")
        self._is_new, self._pictures = run_id is None, set[Path]()
        _lost_rows.text = ""
        logging.getLogger("mlflow.utils.async_logging.async_logging_queue").addFilter(_lost_rows)
        self.id = self._mlflow.start_run(run_id=run_id, run_name=folder.name).info.run_id

    def configuration(self, tables: Mapping[str, Any]) -> None:
        """Log it as an artifact, and as parameters, which MLflow does not let a resumed run change."""
        self._mlflow.log_dict(dict(tables), "config.json")
        values = [(key, str(value)[:6000]) for key, value in flatten(tables)] if self._is_new else []
        for first in range(0, len(values), 100):  # more are refused at once
            self._mlflow.log_params(dict(values[first : first + 100]))

    def scalars(self, row: Mapping[str, float], step: int) -> None:
        """Queue figures as metrics."""
        self._require_sent()
        self._mlflow.log_metrics(dict(row), step=step, synchronous=False)

    def picture(self, path: Path, step: int) -> None:
        """Keep a picture for `close`, which logs it as an artifact."""
        self._pictures.add(path)

    def close(self) -> None:
        """Log the pictures, send the remaining figures, and mark the run as finished."""
        for path in sorted(self._pictures):
            self._mlflow.log_artifact(str(path))
        self._mlflow.flush_async_logging()
        self._require_sent()
        self._mlflow.end_run()

    def _require_sent(self) -> None:
        if _lost_rows.text:
            raise ConnectionError(_lost_rows.text)


class _LastMessage(logging.Filter):
    """Keeps the last message of a logger, instead of printing it."""

    text = ""

    def filter(self, record: logging.LogRecord) -> bool:
        self.text = record.getMessage()
        return False


_lost_rows = _LastMessage()
"""What MLflow's threads say about figures that they could not send."""


class WeightsAndBiases(Tracker):
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
            settings=self._wandb.Settings(
                console="off", x_graphql_retry_max=3, finish_timeout=_PATIENCE_S, finish_timeout_raises=True
            ),
        )
        self.id = self._run.id

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
                f"pip install 'peclr-dali[{name}]', or take it out of run.trackers"
            )


class Trackers:
    """All trackers of a run, on rank 0. A tracker that fails is dropped with one warning. It never ends the run.

    Args:
        names: keys of `TRACKERS`.
        tables: the run's configuration.
        first_step: steps already taken.
    """

    def __init__(self, names: Sequence[str], folder: RunFolder, tables: Mapping[str, Any], *, first_step: int) -> None:
        self._trackers: dict[str, Tracker] = {}
        for name in dict.fromkeys(names):
            with self._dropped_if_it_fails(name):
                self._start(name, folder, first_step)
        self._each(lambda tracker: tracker.configuration(tables))
        self._step = first_step
        self._pictures = dict.fromkeys((folder.views_picture, folder.loss_picture, folder.predictions_picture), 0)

    def _start(self, name: str, folder: RunFolder, first_step: int) -> None:
        file = folder.root / f"tracker-{name}.txt"
        known = file.read_text().strip() if file.exists() else ""
        tracker = TRACKERS[name](folder.root, first_step, known or None)
        self._trackers[name] = tracker
        if tracker.id is not None:
            write_text(file, f"{tracker.id}\n")

    @contextmanager
    def _dropped_if_it_fails(self, name: str) -> Iterator[None]:
        try:
            yield
        except (Exception, SystemExit) as error:
            self._trackers.pop(name, None)
            reason = f"{type(error).__name__}: {in_one_line(error, 400)}"
            log.warning('the tracker "%s" is dropped and the run continues: %s', name, reason)

    def _each(self, call: Callable[[Tracker], None]) -> None:
        for name, tracker in [*self._trackers.items()]:
            with self._dropped_if_it_fails(name):
                call(tracker)

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
        """End the records of all trackers."""
        self._show_pictures()
        self._each(lambda tracker: tracker.close())
