"""What one DALI batch is made from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pipelines.views.plan import Plan

Encoded = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Request:
    """N samples.

    Attributes:
        encoded: N files as `pipelines.files.check.check_image` lets them pass, each (bytes,) uint8.
        plan: their views.
    """

    encoded: Sequence[Encoded]
    plan: Plan

    def only(self, row: int) -> Request:
        """The request of one sample."""
        return Request([self.encoded[row]], self.plan.only(row))
