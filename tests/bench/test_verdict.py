"""The sentence that `bench-loader` ends with."""

from __future__ import annotations

from typing import Any

from bench.loaders.compare import verdict


def row(ours_ms: float, *, busy: float = 2.0, **stages: tuple[float, float]) -> dict[str, Any]:
    """A row of a loader on 2 cores; `stages`: images/s and CPU ms of an image."""
    parts = {"read": (40000.0, 0.03), "decode": (9000.0, 0.20), **stages}
    return {
        "machine": {"cores": 2},
        "settings": {},
        "loaders": [{"images_per_s": 5000.0, "cpu_ms_per_image": ours_ms, "cores_busy": busy}],
        "stages": [
            {"name": f"{name} only", "images_per_s": rate, "cpu_ms_per_image": ms} for name, (rate, ms) in parts.items()
        ],
    }


def test_processor_and_what_it_does_most_are_named() -> None:
    said = verdict(row(0.37))
    assert said.startswith("The loader makes 5000 images/s; the processor limits it (100% of 2 cores busy)")
    assert "decoding takes 54% of its time" in said  # 0.20 of 0.03 + 0.20 + 0.14
    assert "making views takes 75% of its time: change to more cores" in verdict(row(0.92))
    assert "reading takes 69% of its time: change to fewer and larger files" in verdict(row(0.75, read=(9.0, 0.52)))


def test_parts_that_cost_more_alone_leave_nothing_for_the_views() -> None:
    assert "decoding takes 87% of its time" in verdict(row(0.2))


def test_waiting_is_named_where_no_core_is_short() -> None:
    said = verdict(row(0.37, busy=0.9))
    assert "no core limits it (45% of 2 busy) but waiting; the part 'decode only' alone makes 9000" in said
    assert "pipelines.threads" in said
