"""Trains pose encoders. A user's own training loop can use `ExactStep`, `Lars` and `World` (the ranks)."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from peclr_dali.train.distributed.world import World as World
    from peclr_dali.train.distributed.world import described_world as described_world
    from peclr_dali.train.distributed.world import joined as joined
    from peclr_dali.train.steps.exact import ExactStep as ExactStep
    from peclr_dali.train.steps.optim import Lars as Lars

_PUBLIC = {
    "ExactStep": "peclr_dali.train.steps.exact", "Lars": "peclr_dali.train.steps.optim",
    **dict.fromkeys(("World", "described_world", "joined"), "peclr_dali.train.distributed.world"),
}  # fmt: skip


def __getattr__(name: str) -> Any:
    """Import torch only when one of these names is used, since every command imports this package."""
    if name in _PUBLIC:
        return getattr(importlib.import_module(_PUBLIC[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
