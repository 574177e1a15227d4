"""The sentence that `bench-loader` ends with."""

from __future__ import annotations

import pytest

from bench.loaders.verdict import PageCache, costs_s, verdict
from bench.measure import MeanInterval, Rate

STAGES = {
    "read only": (40000.0, 0.03),
    "decode only": (9000.0, 0.20),
    "geometry only": (16000.0, 0.10),
    "views only": (14000.0, 0.13),
    "hand-over only": (90000.0, 0.01),
}


def rate(images_per_s: float, cpu_ms: float, *, busy: float = 2.0) -> Rate:
    seconds = cpu_ms / 1e3 * 1000 / busy
    return Rate((images_per_s * 0.99, images_per_s * 1.01), cpu_ms / 1e3, 1000, seconds)


def stages(**changed: tuple[float, float]) -> dict[str, Rate]:
    return {name: rate(*figures) for name, figures in {**STAGES, **changed}.items()}


def test_costs_are_those_of_the_parts() -> None:
    expected = {"reading": 0.03, "decoding": 0.20, "geometry": 0.10, "colour": 0.03, "handing over": 0.01}
    assert costs_s(stages()) == pytest.approx({part: ms / 1e3 for part, ms in expected.items()})


def test_costs_of_the_graph_are_differences() -> None:
    graph = stages()
    del graph["geometry only"], graph["views only"]
    graph |= {"decode + geometry": rate(900, 0.9), "decode + views": rate(600, 1.5)}
    costs = costs_s(graph)
    assert costs["geometry"] == pytest.approx(0.7e-3)
    assert costs["colour"] == pytest.approx(0.6e-3)


def test_processor_and_its_largest_part_are_named() -> None:
    said = verdict(rate(5000, 0.37), 2, stages())
    assert "100% of 2 cores busy" in said
    assert "decoding takes 54% of its time" in said
    slow_views = stages(**{"geometry only": (9.0, 0.5), "views only": (9.0, 0.6)})
    assert "geometry takes" in verdict(rate(5000, 0.37), 2, slow_views)


def test_waiting_is_named_where_no_core_is_short() -> None:
    said = verdict(rate(5000, 0.37, busy=0.9), 2, stages())
    assert "45% of 2 busy" in said
    assert "'decode only'" in said
    assert "--tune" in said


def test_storage_is_named_where_a_cold_cache_is_much_slower() -> None:
    warm = MeanInterval(5000, 4900, 5100)
    slow = PageCache(warm, MeanInterval(100, 90, 110), 2**20)
    said = verdict(rate(5000, 0.37), 2, stages(), cache=slow)
    assert "storage limits it (100 against 5000 images/s, 100 MiB/s)" in said
    unsure = PageCache(warm, MeanInterval(2000, -9000, 13000), 2**20)
    assert "storage" not in verdict(rate(5000, 0.37), 2, stages(), cache=unsure)


def test_step_decides_whether_it_is_loader_bound() -> None:
    said = verdict(rate(5000, 0.37), 2, stages(), step=rate(250, 8))
    assert said.startswith("Training is not loader-bound")
    assert "20.0 times that" in said
    said = verdict(rate(5000, 0.37), 2, stages(), step=rate(10000, 0.1))
    assert said.startswith("Training is loader-bound")
    assert "0.50 of that" in said
    assert "decoding" in said


def test_overlapping_intervals_decide_nothing() -> None:
    said = verdict(rate(5000, 0.37), 2, stages(), step=rate(5040, 0.1))
    assert said.startswith("Whether training is loader-bound cannot be told")
    assert "--repeats" in said
