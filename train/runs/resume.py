"""Resumes from a checkpoint."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from errors import UserError
from train.config.tables import first_difference, to_dict
from train.runs.checkpoint import load_checkpoint
from train.steps.state import TrainingState

log = logging.getLogger(__name__)


def restore(state: TrainingState[Any, Any], path: Path, config: object, *, images: list[int]) -> None:
    """Load a checkpoint into a new state.

    Args:
        config: the run's configuration. It must equal the checkpoint's, except for `FREE_ON_RESUME`.
        images: number of images of each source. They must be the same as before, since the order depends on them.

    Raises:
        UserError: the file cannot be read, or belongs to another run, dataset or model.
    """
    saved = load_checkpoint(path)
    difference = first_difference(saved["config"], to_dict(config))
    if difference is not None:
        raise UserError(f"{path} is of another run: {difference}. Put that run's own checkpoint there.")
    for key in (*state.state_dict(), "images"):
        if key not in saved:
            raise UserError(f"{path} is no checkpoint to go on from: it has no {key}. Use another one of this run.")
    if saved["images"] != images:
        before, now = (" + ".join(map(str, counts)) for counts in (saved["images"], images))
        raise UserError(
            f"{path} is of a run on {before} images, and there are {now} now: restore the data, or "
            f"start a new run with --set run.out=..."
        )
    try:
        state.load_state_dict(saved)
    except (UserError, MemoryError):
        raise
    except Exception as error:  # torch checks little, and raises many kinds of errors
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise UserError(f"{path} holds another model, or a state that does not fit it: {reason}") from error
    log.info("resuming after step %d from %s", state.steps_done, path)
