"""The samples of a loader that cannot be used."""

import logging
import threading

log = logging.getLogger(__name__)


class Quarantine:
    """Samples that cannot be used. Each is logged once. Several threads may use it."""

    def __init__(self) -> None:
        self._reasons: dict[int, str] = {}
        self._lock = threading.Lock()

    def __contains__(self, sample: int) -> bool:
        return sample in self._reasons

    def __len__(self) -> int:
        return len(self._reasons)

    def add(self, sample: int, location: str, reason: str) -> None:
        """Add a bad sample, and log it if it is new."""
        with self._lock:
            if sample in self._reasons:
                return
            self._reasons[sample] = reason
        log.warning("%s cannot be used (%s): another image takes its place", location, reason)

    @property
    def reasons(self) -> dict[int, str]:
        """Row of the index -> reason."""
        with self._lock:
            return dict(self._reasons)
