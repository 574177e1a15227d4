"""Trains pose encoders; for a loop of one's own: `ExactStep`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from train.steps.exact import ExactStep as ExactStep


def __getattr__(name: str) -> Any:
    """Imports torch only for who asks for `ExactStep`: the commands import this package first."""
    if name == "ExactStep":
        from train.steps.exact import ExactStep

        return ExactStep
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
