"""The input of one DALI batch: files to decode, and the plan of their views."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pipelines.views.plan import Plan

Encoded = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Request:
    """The files and the plan of N samples.

    Attributes:
        encoded: N files that passed `pipelines.files.check.check_image`, each (bytes,) uint8.
    """

    encoded: Sequence[Encoded]
    plan: Plan

    def only(self, row: int) -> Request:
        """The request of one sample."""
        return Request([self.encoded[row]], self.plan.only(row))
