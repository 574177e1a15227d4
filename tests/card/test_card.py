"""The product on a card of make-believe: no mixed devices, no wait and no copy that is not in a list with its reason.

All cases of `cases.py` run in one process, since it is torch's import that takes long.
"""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from peclr_dali.bench.gpu.card.card import card
from peclr_dali.bench.gpu.card.environment import card_environment
from peclr_dali.errors import UserError
from tests.card.cases import ASKS, CASES, COPIES, FREE, STEPS

ROOT = Path(__file__).parents[2]

EVERY_STEP = "in every step"
EVERY_STEP_OF_FP16 = f"{EVERY_STEP} of fp16"
WAITS = {
    "pipelines/render/renderers.py _wait": f"{EVERY_STEP}, the loader's thread: DALI may reuse its memory",
    "pipelines/render/apply_appearance.py _constants": "once: the constants of the augmentations",
    "train/steps/exact.py _compare_once": "the first step only",
    "train/steps/training_state.py step": f"{EVERY_STEP_OF_FP16}: whether a gradient overflowed decides on LARS",
    "train/steps/training_state.py state_dict": "fp16 only: the scale, for a checkpoint",
    "train/steps/training_state.py weights_are_finite": "before a checkpoint",
    "train/runs/checkpoint.py wait": "the thread that writes checkpoints",
    "train/runs/checkpoint.py write_checkpoint": "the best network, after a validation",
    "train/runs/meter.py require_finite_loss": "before a row of metrics or a checkpoint",
    "train/pretrain.py figures": "a row of metrics",
    "train/finetune.py figures": "a row of metrics",
    "train/trainer.py _take_steps": "before a validation, so that its time is not the steps'",
    "train/runs/pictures.py save_views": "the picture of the first batch",
    "train/pose/pose_run.py require_finite": "once, when a network was loaded",
    "train/pose/inference.py estimate_share": "a validation's or a prediction's result",
    "train/evaluation/two_pass_crop.py predict": "a prediction's result",
    "train/probe/linear_probe.py load": "once in a run: the labels of the probe's images",
    "train/probe/linear_probe.py <listcomp>": "once in a run: the labels of the probe's images",
    "train/probe/linear_probe.py _features": "a probe's result",
}
"""Functions of the product that may wait for the card, and why."""

OTHER_COPIES = {
    "train/steps/training_state.py __init__": "a new network",
    "train/steps/training_state.py load_state_dict": "a checkpoint",
    "train/steps/optim.py load_state_dict": "a checkpoint",
    "train/pose/pose_run.py load_pose_run": "a checkpoint",
    "train/pose/pose_run.py <genexpr>": "once, what a loaded network is tried on",
    "train/pose/inference.py estimate_poses": "a checkpoint's network",
    "train/evaluation/two_pass_crop.py estimate_in_two_passes": "a checkpoint's network",
    "train/probe/linear_probe.py _features": "a probe's images: all of them pinned would take 100 MB for a rare use",
}
"""Functions that may copy to the card from memory that is not pinned, or wait for the copy, and why."""

SLOW = (
    "finetune, frozen", "timm", "never", "one micro-batch", "fp16 recomputed", "fp64", "contiguous", "upstream",
    "direct", "scalar range", "LARS on weights",
)  # fmt: skip


@pytest.fixture(scope="module")
def seen(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the card saw in each case of the tests that were chosen."""
    if shutil.which("gcc") is None:
        pytest.skip("the card of make-believe needs gcc")
    tests = [item for item in request.session.items if isinstance(item, pytest.Function) and item.path == request.path]
    cases = {str(test.callspec.params["case"]) for test in tests if hasattr(test, "callspec")}
    cases |= {"fp32"} if "loss on the CPU" in cases else set()  # which is compared with it
    found = tmp_path_factory.mktemp("card") / "seen.json"
    line = [sys.executable, "-m", "tests.card.cases", str(found), *sorted(cases)]
    with card_environment() as environment:
        environment |= {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
        subprocess.run(line, cwd=ROOT, env=environment, check=True)
    loaded: dict[str, Any] = json.loads(found.read_text())
    return loaded


def unexplained(found: dict[str, Any], *, is_fp16: bool = False) -> list[str]:
    """The error of a case, and what it did that is in no list. In a step, or between two rows of metrics, only the
    loader's thread may wait, and fp16 for one number."""
    lines = [found["error"]] if found["error"] else []
    for name, phase in found["phases"].items():
        lines += [f"{name}: {line}" for line in phase["mixed"]]
        for kind, known in (("waits", WAITS), ("copies", OTHER_COPIES)):
            if name.removesuffix(" again") in ("step", "loop"):
                known = {caller: reason for caller, reason in known.items() if reason.startswith(EVERY_STEP)}
            if not is_fp16:
                known = {caller: reason for caller, reason in known.items() if EVERY_STEP_OF_FP16 not in reason}
            for how, callers, times in phase[kind]:
                if not callers or callers[0] not in known:
                    lines.append(f"{name}: {times} {kind}, {how} at {' < '.join(callers)}")
    return lines


def cases(names: Iterable[str]) -> list[Any]:
    return [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in names]


@pytest.mark.parametrize("case", cases(STEPS))
def test_a_step_neither_waits_nor_mixes_devices(case: str, seen: dict[str, Any]) -> None:
    assert unexplained(seen[case], is_fp16="fp16" in case) == []
    assert [times for _, _, times in seen[case]["phases"]["step"]["waits"]] == [1] * ("fp16" in case)
    # All figures in one copy, and whether the weights are finite in another.
    assert [times for _, _, times in seen[case]["phases"]["row of metrics"]["waits"]] == [1, 1]
    assert seen[case]["phases"]["step"]["operators"] > 500
    assert math.isfinite(seen[case]["loss"])


RUNS = [name for name in CASES if name.startswith(("pretrain", "finetune"))]


@pytest.mark.parametrize("case", cases(RUNS))
def test_a_run_asks_the_card_for_nothing_between_two_rows_of_metrics(case: str, seen: dict[str, Any]) -> None:
    assert unexplained(seen[case], is_fp16=case == "finetune, frozen") == []
    assert case == "pretrain, probe" or seen[case]["phases"]["loop"]["operators"] > 500


@pytest.mark.parametrize("case", ["pretrain, views by the graph", "pretrain, fused views", "pretrain, pairs"])
def test_the_steps_stream_goes_first_and_the_allocator_knows_that_it_uses_the_views(
    case: str, seen: dict[str, Any]
) -> None:
    """The loader's stream has the priority 0, and frees the views' memory unless it waits for the step's."""
    recorded = seen[case]["phases"]["loop"]["recorded"]
    assert [(priority, callers[0]) for priority, callers, _ in recorded] == [
        (-1, "pipelines/loader/__init__.py __iter__")
    ]


@pytest.mark.parametrize(
    ("case", "found"),
    [
        ("broken: a tensor on the CPU", "aten.addcmul.out: cuda (3, 1, 1), cpu (8, 3, 32, 32)"),
        ("broken: item", "loop: 2 waits, _local_scalar_dense at train/steps/exact.py _step"),
        (
            "broken: item beside the gradient",
            "loop: 2 waits, _local_scalar_dense at train/steps/training_state.py step",
        ),
        ("broken: an unpinned copy", "loop: 4 copies, copy to the card at pipelines/batch.py"),
    ],
)
def test_a_defect_is_found(case: str, found: str, seen: dict[str, Any]) -> None:
    assert found in "\n".join(unexplained(seen[case]))


@pytest.mark.parametrize("case", ["questions"])
def test_waits_and_copies_are_seen(case: str, seen: dict[str, Any]) -> None:
    assert seen[case]["error"] is None
    kinds = {name: [kind for kind in ("waits", "copies") if at[kind]] for name, at in seen[case]["phases"].items()}
    groups: list[tuple[Any, list[str]]] = [(ASKS, ["waits"]), (COPIES, ["copies"]), (FREE, [])]
    expected = {name: kind for group, kind in groups for name in group}
    assert kinds == expected


@pytest.mark.parametrize("case", ["loss on the CPU"])
def test_the_loss_is_that_of_a_cpu(case: str, seen: dict[str, Any]) -> None:
    assert seen["fp32"]["loss"] == pytest.approx(seen[case]["loss"], rel=1e-5)


def test_a_process_without_the_library_is_refused() -> None:
    with pytest.raises(UserError, match="start it with card_environment"), card():
        pass


def test_a_missing_compiler_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(UserError, match="gcc is missing"), card_environment():
        pass
