"""Counts bad files over all ranks, writes quarantine.jsonl, and stops the run if there are too many."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from peclr_dali.errors import UserError
from peclr_dali.pipelines.arrays import IntArray
from peclr_dali.pipelines.batch import Batch
from peclr_dali.pipelines.config import DataConfig
from peclr_dali.pipelines.samples.index import Index
from peclr_dali.train.distributed.world import World
from peclr_dali.writing import write_text


class BadFiles:
    """Counts bad files, and ends the run if there are too many.

    Checkpoints keep the counts, so a resumed run continues them. Ranks sum them at log steps and before checkpoints;
    rank 0 then rewrites `file`, quarantine.jsonl, with a row for each bad file, the most frequent first.
    """

    def __init__(self, index: Index, data: Sequence[DataConfig], file: Path, world: World) -> None:
        self._index, self._file, self._world = index, file, world
        self._names = [source.name for source in index.sources] or [index.name]
        self._limits = [source.max_bad_share for source in data]
        self._ends = np.cumsum(index.counts)
        self._used = np.zeros(len(self._ends), np.int64)  # of this rank, since the last sum, from each source
        self._met: Counter[int] = Counter()  # the same: how often each bad row was met
        self._total_used = np.zeros_like(self._used)
        self._total_met: dict[int, tuple[str, int]] = {}  # row -> reason, times

    def state_dict(self) -> dict[str, Any]:
        """The counts of all ranks up to the last sum."""
        return {"used": self._total_used.tolist(), "met": dict(self._total_met)}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Continue the counts of a checkpoint."""
        self._total_used = np.array(saved["used"], np.int64)
        self._total_met = dict(saved["met"])

    def count(self, batch: Batch) -> None:
        """Count a batch of this rank."""
        self._used += np.bincount(self._source(batch.images.numpy()), minlength=len(self._ends))
        self._met.update(batch.bad.tolist())

    def sum_ranks(self, reasons: Mapping[int, str]) -> None:
        """Sum the counts of all ranks; call it on all. `reasons` has the reason of each of this rank's bad files."""
        mine = self._used.copy(), {row: (reasons[row], times) for row, times in self._met.items()}
        everybody = self._world.gather_objects(mine)
        for used, met in everybody:
            self._total_used = self._total_used + used
            for row, (reason, times) in met.items():
                before, so_far = self._total_met.get(row, (reason, 0))
                self._total_met[row] = before, so_far + times
        if self._world.is_main and any(met for _, met in everybody):
            self.write()
        self._used[:] = 0
        self._met.clear()

    @property
    def too_many(self) -> bool:
        """Whether a limit was exceeded at the last sum; the same on all ranks."""
        return any(share > limit for share, limit in zip(self._shares(), self._limits, strict=True))

    def require_few(self, step: int) -> None:
        """Raise a `UserError`, on all ranks after the same step, if a limit is exceeded."""
        for number, (share, limit) in enumerate(zip(self._shares(), self._limits, strict=True)):
            if share > limit:
                of = "" if len(self._limits) == 1 else f"{number}."
                raise UserError(
                    f"{share:.2%} of the images drawn from {self._names[number]} up to step {step} cannot be used, "
                    f"more than data.{of}max_bad_share = {limit:g}; {self._file} says which and why. "
                    f"The run is saved. Mend the data and start a new run; or list the bad files with 'python cli.py "
                    f"check-data' and start a new run with data.{of}bad_list; or raise the limit and go on with "
                    f"--resume auto"
                )

    def write(self) -> None:
        """Write the file, if there are bad files or an earlier file."""
        if self._total_met or self._file.exists():
            met = sorted(self._total_met.items(), key=lambda item: (-item[1][1], item[0]))
            rows = [
                {"path": str(self._index.path(row)), "reason": reason, "met": times} for row, (reason, times) in met
            ]
            write_text(self._file, "".join(f"{json.dumps(row)}\n" for row in rows))

    def _source(self, rows: IntArray) -> IntArray:
        """Number of the source of each row."""
        return np.searchsorted(self._ends, rows, side="right")

    def _shares(self) -> list[float]:
        """Share of bad files among the files drawn from each source."""
        rows = np.array(list(self._total_met), np.int64)
        times = np.array([times for _, times in self._total_met.values()], np.int64)
        bad = np.bincount(self._source(rows), weights=times, minlength=len(self._ends))
        shares: list[float] = (bad / np.maximum(1, bad + self._total_used)).tolist()
        return shares
