"""Counts bad files over all ranks, writes quarantine.jsonl, and stops the run if there are too many."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from errors import UserError
from pipelines.arrays import IntArray
from pipelines.batch import Batch
from pipelines.config import DataConfig, each_source
from pipelines.request_maker import Quarantine
from pipelines.samples.index import Index
from train.distributed.world import World
from train.steps.training_state import TrainingState
from writing import write_text


class BadFiles:
    """Counts bad files, and ends the run if there are too many.

    The counts are part of the training state, so checkpoints keep them and a resumed run continues them. Ranks sum them
    at log steps and before checkpoints; rank 0 then rewrites `file`, quarantine.jsonl, with a row for each bad file,
    the most frequent first. `quarantine` has this rank's bad files with their reasons.
    """

    def __init__(
        self,
        index: Index,
        data: DataConfig | Sequence[DataConfig],
        file: Path,
        state: TrainingState[Any, Any],
        world: World,
        quarantine: Quarantine,
    ) -> None:
        self._index, self._file, self._state, self._world, self._quarantine = index, file, state, world, quarantine
        self._names = [source.name for source in index.sources] or [index.name]
        self._limits = [source.max_bad_share for source in each_source(data)]
        self._ends = np.cumsum(index.counts)
        self._used = np.zeros(len(index.counts), np.int64)  # counts of this rank since the last sum
        self._met: Counter[int] = Counter()
        if not state.bad_files:
            state.bad_files = {"used": [0] * len(self._used), "met": {}}
        elif world.is_main:
            self._write()  # rows written after the checkpoint belong to steps that are repeated
        self._shares = self._sum_shares()

    def count(self, batch: Batch, *, agree: bool) -> None:
        """Count a batch of this rank. With `agree`, which must be the same on all ranks, sum over ranks."""
        self._used += np.bincount(self._source(batch.samples.numpy()), minlength=len(self._ends))
        self._met.update(batch.bad.tolist())
        if not agree:
            return
        reasons = self._quarantine.reasons
        mine = self._used.tolist(), {row: (reasons[row], times) for row, times in self._met.items()}
        total, news = self._state.bad_files, False
        for used, met in self._world.gather_objects(mine):
            total["used"] = [before + more for before, more in zip(total["used"], used, strict=True)]
            for row, (reason, times) in met.items():
                before = total["met"].get(row, [reason, 0])
                total["met"][row] = [before[0], before[1] + times]
                news = True
        if news and self._world.is_main:
            self._write()
        self._used[:] = 0
        self._met.clear()
        self._shares = self._sum_shares()

    @property
    def too_many(self) -> bool:
        """Whether a limit was exceeded at the last sum; the same on all ranks."""
        return any(share > limit for share, limit in zip(self._shares, self._limits, strict=True))

    def require_few(self) -> None:
        """Raise a `UserError`, on all ranks after the same step, if a limit is exceeded."""
        for number, (share, limit) in enumerate(zip(self._shares, self._limits, strict=True)):
            if share > limit:
                of = "" if len(self._limits) == 1 else f"{number}."
                raise UserError(
                    f"{share:.2%} of the images drawn from {self._names[number]} up to step {self._state.steps_done} "
                    f"cannot be used, more than data.{of}max_bad_share = {limit:g}: {self._summary(number)}, "
                    f"listed in {self._file}. The run is saved. Mend the data and start a new run; or list the bad "
                    f"files with 'python cli.py check-data' and start a new run with data.{of}bad_list; or raise the "
                    f"limit and go on with --resume auto"
                )

    def _source(self, rows: IntArray) -> IntArray:
        """Number of the source of each row."""
        return np.searchsorted(self._ends, rows, side="right")

    def _sum_shares(self) -> list[float]:
        """Share of bad files among the files drawn from each source."""
        met, used = self._state.bad_files["met"], self._state.bad_files["used"]
        times = np.array([times for _, times in met.values()], np.int64)
        bad = np.bincount(self._source(np.array(list(met), np.int64)), weights=times, minlength=len(self._ends))
        return [some / max(1, some + good) for some, good in zip(bad.tolist(), used, strict=True)]

    def _summary(self, source: int) -> str:
        """The most frequent reasons, with an example for each, and the number of bad files."""
        met = self._state.bad_files["met"]
        rows = np.array(sorted(met), np.int64)
        here: list[int] = rows[self._source(rows) == source].tolist()
        files = Counter(met[row][0] for row in here)
        example = {met[row][0]: self._index.path(row) for row in reversed(here)}
        shown = [f"{count} x {reason} ({example[reason]})" for reason, count in files.most_common(3)]
        return f"{'; '.join([*shown, *(['...'] if len(files) > 3 else [])])}. {len(here)} in all"

    def _write(self) -> None:
        met = sorted(self._state.bad_files["met"].items(), key=lambda item: (-item[1][1], item[0]))
        lines = [
            json.dumps({"path": str(self._index.path(row)), "reason": reason, "met": times}) + "\n"
            for row, (reason, times) in met
        ]
        write_text(self._file, "".join(lines))
