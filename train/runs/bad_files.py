"""Counts bad files over all ranks, writes quarantine.jsonl, and stops the run if there are too many."""

import json
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np

from peclr_dali.errors import UserError
from peclr_dali.pipelines.batch import Batch
from peclr_dali.pipelines.loader.prepare import Quarantine
from peclr_dali.pipelines.samples.index import Index
from peclr_dali.train.runs.run import AnyRun
from peclr_dali.writing import write_text


class BadFiles:
    """Counts bad files, and ends the run if there are too many.

    Checkpoints keep the counts, so a resumed run continues them. Ranks sum them regularly and before checkpoints; rank
    0 then rewrites quarantine.jsonl, with a row for each bad file, the most frequent first.

    Attributes:
        quarantine: the bad files that this rank's loader has met, with their reasons.
    """

    def __init__(self, run: AnyRun, index: Index) -> None:
        self._world, self._file, self._every = run.world, run.folder.quarantine_file, run.config.run.log_every
        self._index, self.quarantine = index, Quarantine()
        self._limits = [source.max_bad_share for source in run.config.data]
        self._ends = np.cumsum(index.counts)
        self._used = np.zeros(len(self._ends), np.int64)  # of this rank, since the last sum, from each source
        self._met: Counter[int] = Counter()  # the same: how often each bad row was met
        self._total_used, self._total_met = self._used.copy(), Counter[int]()
        self._reasons: dict[int, str] = {}  # of the rows in `_total_met`
        self._shares = np.zeros(len(self._ends))  # of bad files among those drawn from each source, at the last sum

    def state_dict(self) -> dict[str, Any]:
        """The counts of all ranks up to the last sum."""
        met, reasons = dict(self._total_met), dict(self._reasons)
        return {"bad_files": {"used": self._total_used.tolist(), "met": met, "reasons": reasons}}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Continue the counts of a checkpoint."""
        counts = saved["bad_files"]
        self._total_used = np.array(counts["used"], np.int64)
        self._total_met, self._reasons = Counter(counts["met"]), dict(counts["reasons"])

    def count(self, batch: Batch, step: int) -> None:
        """Count this rank's batch of a step, and sum the ranks' counts if it is due. All ranks call it together."""
        samples = np.sort(batch.samples.numpy(), axis=1)  # (N, V)
        images = samples[np.diff(samples, axis=1, prepend=-1) > 0]  # the views of a row may share one
        self._used += np.bincount(np.searchsorted(self._ends, images, side="right"), minlength=len(self._ends))
        self._met.update(batch.bad.tolist())
        if step % self._every == 0:
            self.sum_ranks()

    def sum_ranks(self) -> None:
        """Sum the counts of all ranks, which call it together."""
        reasons = self.quarantine.reasons
        everybody = self._world.gather_objects((self._used, self._met, {row: reasons[row] for row in self._met}))
        for used, met, why in everybody:
            self._total_used = self._total_used + used
            self._total_met.update(met)
            self._reasons = {**why, **self._reasons}
        sources = np.searchsorted(self._ends, list(self._total_met), side="right")
        bad = np.bincount(sources, weights=list(self._total_met.values()), minlength=len(self._ends))
        self._shares = bad / np.maximum(1, bad + self._total_used)
        if self._world.is_main and any(met for _, met, _ in everybody):
            self.write()
        self._used, self._met = np.zeros_like(self._used), Counter()

    @property
    def too_many(self) -> bool:
        """Whether a limit was exceeded at the last sum; the same on all ranks."""
        return bool((self._shares > self._limits).any())

    def require_few(self, step: int) -> None:
        """Raise a `UserError`, on all ranks after the same step, if a limit is exceeded."""
        if not self.too_many:
            return
        number = int((self._shares > self._limits).argmax())  # the first source of several
        name = [source.name for source in self._index.sources or [self._index]][number]
        of = f"{number}." if self._index.sources else ""
        raise UserError(
            f"{self._shares[number]:.2%} of the images drawn from {name} up to step {step} cannot be used, more than "
            f"data.{of}max_bad_share = {self._limits[number]:g}; {self._file} says which and why. The run is saved. "
            f"Mend the data and start a new run; or list the bad files with 'python cli.py check-data' and start a new "
            f"run with data.{of}bad_list; or raise the limit and go on with --resume auto"
        )

    def write(self) -> None:
        """Write the file, if there are bad files or an earlier file."""
        if self._total_met or self._file.exists():
            met = sorted(self._total_met.items(), key=lambda item: (-item[1], item[0]))
            rows = [
                {"path": self._index.location(row), "reason": self._reasons[row], "met": times} for row, times in met
            ]
            write_text(self._file, "".join(f"{json.dumps(row)}\n" for row in rows))
