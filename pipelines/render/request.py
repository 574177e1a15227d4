"""The input of one DALI batch: files to decode, or addresses of kept pixels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pipelines.arrays import IntArray
from pipelines.views.plan import KeptRegions, Plan

Encoded = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Request:
    """The files and the plan of N samples.

    Attributes:
        encoded: N files that passed `pipelines.files.check.check_image`, each (bytes,) uint8. Empty for kept pixels.
        address: (N,) int64, of the first byte of each sample's kept RGB pixels; None for files. The memory outlives the
            request.
        kept: the regions of the kept pixels, which hold what the views show; None for files.
    """

    encoded: Sequence[Encoded]
    plan: Plan
    address: IntArray | None = None
    kept: KeptRegions | None = None

    def only(self, row: int) -> Request:
        """The request of one sample."""
        return Request([self.encoded[row]], self.plan.only(row))
