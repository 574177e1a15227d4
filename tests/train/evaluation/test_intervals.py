"""Intervals over runs: in closed form, and how often they hold the truth."""

import math
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from peclr_dali.models.config import EncoderConfig
from peclr_dali.train.config.finetuning import FinetuneConfig
from peclr_dali.train.evaluation.errors import trials_of
from peclr_dali.train.pose.metrics import Interval, interval_over_runs

HANDS = 50


def over_runs(differences: list[float], trials: list[int], hands: npt.NDArray[np.float64] | None = None) -> Interval:
    """The interval of these differences, to which that of a hand (N,) is added; four images of each hand."""
    images = np.zeros(4 * HANDS) if hands is None else hands.repeat(4)
    tables = [np.ones((len(images), 21)) * difference + images[:, None] for difference in differences]
    return interval_over_runs(tables, trials, np.arange(len(images)) // 4)


def test_pairs_of_one_trial_count_as_one() -> None:
    """Three trials with means of -0.2; four times the same three differences; a single trial."""
    same = over_runs([-0.1, -0.2, -0.3, -0.3, -0.2, -0.1, -0.2, -0.2, -0.2], [0, 1, 2] * 3)
    assert same == pytest.approx((-0.2, -0.2, -0.2))
    three, more = over_runs([-0.1, -0.2, -0.3], [0, 1, 2]), over_runs([-0.1, -0.2, -0.3] * 4, [0, 1, 2] * 4)
    assert three == pytest.approx((-0.2, -0.2 - 4.302653 * 0.1 / 3**0.5, -0.2 + 4.302653 * 0.1 / 3**0.5))
    assert more == pytest.approx(three)
    assert over_runs([-0.1, -0.3], [0, 0]) == pytest.approx((-0.2, -math.inf, math.inf))


def test_pairs_that_share_a_start_on_either_side_are_one_trial(tmp_path: Path) -> None:
    """Whatever side comes first, and however the start is written; random weights and ImageNet's are no start."""
    pre = [str(tmp_path / f"pre_{number}") for number in range(3)]
    same = f"{tmp_path}/other/../pre_0/checkpoints/step_000000009.pt"
    for ours, theirs, expected in (
        (pre, ["random"] * 3, 3),
        (pre, ["peclr_rn18", "networks/peclr_rn18.safetensors", "peclr_rn18"], 1),
        ([pre[0], same, pre[1]], ["imagenet"] * 3, 2),
        (["random", "imagenet", "random"], ["random"] * 3, 3),
    ):
        sides = [
            [FinetuneConfig(encoder=EncoderConfig(weights=weights)) for weights in side] for side in (ours, theirs)
        ]
        for first, second in (sides, sides[::-1]):
            assert len({*trials_of(zip(first, second, strict=True))}) == expected


@pytest.mark.parametrize("share_of_runs", [0.0, 0.5, 1.0])
def test_the_interval_holds_the_truth_as_often_as_it_says(share_of_runs: float) -> None:
    """Two runs, and errors of a hand that all runs share. The true difference is 0."""
    rng, hits = np.random.default_rng(1), 0
    for _ in range(trials := 100):
        runs = rng.normal(size=2) * share_of_runs
        interval = over_runs(runs.tolist(), [0, 1], rng.normal(size=20) * (20 * (1 - share_of_runs**2) / 2) ** 0.5)
        hits += interval.low <= 0 <= interval.high
    assert 0.88 * trials <= hits <= 0.99 * trials
