"""`bench-gpu`, without a GPU: what it runs, with which memory, what it makes of the rows, and what it estimates."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from subprocess import CompletedProcess
from types import SimpleNamespace
from typing import Any

import pytest

from peclr_dali.bench.gpu import estimate
from peclr_dali.bench.gpu.card.environment import card_environment
from peclr_dali.bench.gpu.command import SHIPPED, limited
from peclr_dali.bench.gpu.estimate import Assumed, Count, Gpu, Operator
from peclr_dali.bench.rows import read_rows, rows_of
from peclr_dali.errors import UserError
from peclr_dali.train.distributed.world import World
from peclr_dali.train.steps.memory import HEADROOM_BYTES
from tests.bench.counted import CASES, profiled_peak, settled
from tests.command_line import as_options, run_cli

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "bench" / "results"
SHARE = "per_process_memory_fraction"


def step_row(images_per_s: float, gpu: str = "none", **more: Any) -> dict[str, Any]:
    rate = {"mean": images_per_s, "interval": [1, 2], "repeats": [images_per_s] * 2}
    figures = {
        "precision": "bf16", "batch": 8, "micro_batch": 4, "recompute": "never", "step_s": [1, 1, 1],
        "images_per_s": {"cached": rate, "loaded": rate, "averaged": rate}, "waited_share": 0.01, "loader_share": 0.02,
        "optimizer_share": 0.03, "model_flop_per_s": 1e12, "flop_per_image": 1e9, "peak_memory_mib": 7,
        "device_memory_mib": 8,
    }  # fmt: skip
    config = {"encoder": {"name": "resnet18"}, "geometry": {"side_px": 64}}
    return {
        "machine": {"cpu": "CPU", "gpu": gpu, "cores": 2, "date": "2030-01-01", "commit": "abc"},
        "config": config,
        "precisions": [figures],
        **more,
    }


def test_torch_gets_its_part_of_the_smaller_card() -> None:
    assert limited(11 * 2**30, 80e9)["PYTORCH_ALLOC_CONF"] == f"{SHARE}:0.1275"  # 11 GiB - 1.5 GiB
    assert limited(24 * 2**30, 12e9)["PYTORCH_ALLOC_CONF"] == f"{SHARE}:1.0000"
    assert SHARE not in limited(None, 80e9).get("PYTORCH_ALLOC_CONF", "")


def split(line: list[str]) -> tuple[list[str], str, list[str]]:
    """What starts the program, the command, and its words."""
    at = next(at for at, word in enumerate(line) if word.startswith("bench-"))
    return line[:at], line[at], line[at + 1 :]


def test_both_commands_run_for_each_overlay_and_one_that_fails_stops_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls: list[tuple[str, list[str], str]] = []
    really_run = subprocess.run

    def run(line: list[str], *, env: dict[str, str], **options: Any) -> CompletedProcess[str]:
        begin, command, words = split(line)
        overlay = Path([word for word in words if word.endswith(".toml")][-1]).stem
        calls.append((command, words, overlay))
        assert (SHARE in env.get("PYTORCH_ALLOC_CONF", "")) == (overlay not in ("a100", "h100"))
        if overlay == "a100":
            answer = really_run([*begin, command, "--help"], env=env, cwd=tmp_path, capture_output=True, text=True)
            assert answer.stdout.startswith("Usage: "), answer.stderr
        loader = {"loaders": [{"images_per_s": 4000}], "verdict": "fast"}
        row = loader if command == "bench-loader" else step_row(1000, "Card")
        return CompletedProcess(line, 2 if (command, overlay) == ("bench-train", "rtx_24gb") else 0, json.dumps(row))

    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda device: SimpleNamespace(total_memory=80e9))
    monkeypatch.setattr("subprocess.run", run)
    assert run_cli("bench-gpu", "--set", "train.batch=256", "--out", str(tmp_path / "gpu")) == 1
    assert [(command, overlay) for command, _, overlay in calls] == [
        (command, overlay)
        for overlay in ("rtx_11gb", "rtx_24gb", "a100", "h100")
        for command in ("bench-train", "bench-loader")
    ]
    for command, words, _ in calls:
        assert [words[at + 1] for at, word in enumerate(words) if word == "--set"] == [
            "train.batch=256", "encoder.weights=random"
        ]  # fmt: skip
        assert words[-2:] == ["--record", str(tmp_path / "gpu" / f"{command.removeprefix('bench-')}.jsonl")]
    shown = capsys.readouterr()
    assert "bench-train failed with exit code 2" in shown.err
    assert "loader alone over step" in shown.out
    rows = read_rows(tmp_path / "gpu" / "gpu.jsonl")
    assert [(row["overlay"], row["loader_images_per_s"], row["verdict"]) for row in rows] == [
        ("rtx_11gb", 4000, "fast"), ("a100", 4000, "fast"), ("h100", 4000, "fast")
    ]  # fmt: skip
    calls.clear()
    assert run_cli("bench-gpu", "--card", "h100", "--out", str(tmp_path / "one")) == 0
    assert [(command, overlay) for command, _, overlay in calls] == [("bench-train", "h100"), ("bench-loader", "h100")]
    assert run_cli("bench-gpu", "--card", "h100", "--estimate") == 2
    assert capsys.readouterr().err.endswith("error: --estimate counts for all cards: leave out --card.\n")


def test_what_was_measured_before_ctrl_c_is_in_the_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The measured commands write their own rows, each when it is done; bench-gpu one for each finished overlay."""

    def run(line: list[str], **options: Any) -> CompletedProcess[str]:
        command = split(line)[1]
        if "rtx_24gb" in " ".join(line) and command == "bench-loader":
            raise KeyboardInterrupt
        loader = {"loaders": [{"images_per_s": 4000}], "verdict": "fast"}
        return CompletedProcess(line, 0, json.dumps(loader if command == "bench-loader" else step_row(1000, "Card")))

    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda device: SimpleNamespace(total_memory=80e9))
    monkeypatch.setattr("subprocess.run", run)
    assert run_cli("bench-gpu", "--out", str(tmp_path)) == 130
    assert [row["overlay"] for row in read_rows(tmp_path / "gpu.jsonl")] == ["rtx_11gb"]


def test_a_machine_without_a_gpu_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert run_cli("bench-gpu") == 2
    assert "torch finds no GPU: check nvidia-smi" in capsys.readouterr().err


def test_an_estimate_without_a_compiler_is_refused_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert run_cli("bench-gpu", "--estimate", "--out", str(tmp_path)) == 2
    assert (
        capsys.readouterr().err
        == "error: the card of make-believe needs a C compiler, and gcc is missing: install gcc\n"
    )


@pytest.fixture(scope="session")
def environment() -> Iterator[dict[str, str]]:
    """Of processes that have a card of make-believe."""
    if shutil.which("gcc") is None:
        pytest.skip("the card of make-believe needs gcc")
    with card_environment() as variables:
        yield variables | {"CUDA_VISIBLE_DEVICES": ""}


@pytest.fixture(scope="session")
def counted(request: pytest.FixtureRequest, environment: dict[str, str]) -> dict[str, dict[str, int]]:
    """What was counted in each case of `counted.py`, in one process, since it is torch's import that takes long."""
    is_slow_chosen = any(item.name.endswith("profiler[never]") for item in request.session.items)
    cases = [name for name in CASES if name != "never" or is_slow_chosen]
    line = [sys.executable, "-m", "tests.bench.counted", *cases]
    found: dict[str, dict[str, int]] = json.loads(subprocess.check_output(line, env=environment, cwd=ROOT, text=True))
    return found


def test_a_convolution_is_counted_as_by_hand(counted: dict[str, dict[str, int]]) -> None:
    """Two images of 3 x 8 x 8, four kernels of 3 x 3 x 3: 288 results of 27 products and sums, and as many for the
    weights' gradient. In float32 the images have 1536 bytes, the weights 432, and results and their gradient 1152."""
    assert counted["by hand"] == {
        "kernels": 6,  # convolution, ReLU, sum, the gradient 1, ReLU's gradient, the weights' gradient
        "flop": 2 * 2 * 288 * 27,
        "bytes": (1536 + 432 + 1152) + 2 * 1152 + (1152 + 4) + 4 + (4 + 2 * 1152) + (1152 + 1536 + 432 + 432),
        "live_bytes": 1536 + 512 + 1536 + 512,  # images, weights, what ReLU kept, the weights' gradient
        "peak_bytes": 1536 + 512 + 1536 + 512 + 512 + 1536 + 512,  # also the sum, its gradient, and ReLU's
    }


def test_kernels_of_operators_on_lists_are_those_of_torch(counted: dict[str, dict[str, int]]) -> None:
    assert counted["lists"] == {"two_lists": 2, "one_by_one": 100}


def test_runs_keep_as_many_graphs_whatever_is_in_memory_when_they_begin(counted: dict[str, dict[str, int]]) -> None:
    """Adam's moments are there if a run is resumed, and up to four batches of the loader, or one."""
    assert counted["graphs kept"] == {"new": 2, "resumed": 2, "beside the loader": 2}


@pytest.mark.parametrize("recompute", [pytest.param("never", marks=pytest.mark.slow), "always"])
def test_the_counted_peak_is_that_of_torchs_profiler(recompute: str, counted: dict[str, dict[str, int]]) -> None:
    """Of the tensors behind the card, and of the same step on the CPU. An operator of the CPU may hold something."""
    found = counted[recompute]
    on_cpu = profiled_peak(*settled(World(), recompute))
    assert found["counted"] == pytest.approx(found["behind"], rel=1e-3)
    assert found["counted"] == pytest.approx(on_cpu, rel=1e-3)


def test_the_time_is_the_longest_of_bytes_operations_and_kernels() -> None:
    gpu = Gpu("Card", "a100", 1e9, bytes_per_s=100, peak_16_bit=1000, peak_32_bit=10)
    assumed = Assumed(bandwidth_share=0.5, peak_share=0.1, kernel_s=1)
    assert Operator(bytes=200, flop=100, kernels=3, is_16_bit=True).seconds(gpu, assumed) == 4  # 200 / (100 * 0.5)
    assert Operator(bytes=200, flop=100, kernels=3, is_16_bit=False).seconds(gpu, assumed) == 100  # 100 / (10 * 0.1)
    assert Operator(bytes=200, flop=100, kernels=5, is_16_bit=True).seconds(gpu, assumed) == 5
    count = Count(operators=Counter({Operator(200, 100, 3, True): 2, Operator(500, 0, 1, True): 1}))
    assert count.seconds(gpu, assumed) == 2 * 4 + 10
    assert count.seconds(gpu, assumed, of_products=True) == 2 * 4


@pytest.mark.slow
def test_steps_are_estimated_without_a_gpu_and_what_does_not_fit_stops_no_other(
    environment: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small, large = 1e6, HEADROOM_BYTES + 1.1e9
    cards = (Gpu("Small", "rtx_11gb", small, 1e9, 1e12, 1e12), Gpu("Card", "a100", large, 1e9, 1e12, 1e12))
    monkeypatch.setattr(estimate, "GPUS", cards)
    settings = ("encoder.name=resnet18", "geometry.side_px=96", "train.batch=256", "train.micro_batch=64")
    assert run_cli("bench-gpu", "--estimate", "--out", str(tmp_path), "-c", "simclr_rn50", *as_options(settings)) == 1
    shown = capsys.readouterr()
    assert "the step on Small cannot be counted: encoder.name = 'resnet18': the network needs" in shown.err
    assert "nothing was timed on a card" in shown.out
    (row,) = read_rows(tmp_path / "gpu_estimate.jsonl")
    assert (row["gpu"], row["overlay"], row["precision"]) == ("Card", "a100", "bf16")
    assert row["graphs"] == 4
    assert row["graphs_kept"] < 4  # memory decides, as on a card
    assert row["peak_bytes"] < 1.1e9  # the rest is left to others
    assert 1 < row["over_all_kept"] < 1.5
    assert row["computed_s"][1] < row["computed_s"][0] < row["computed_s"][2]


_ROWS = {(row["configuration"], row["gpu"]): row for row in rows_of(RESULTS / "gpu_estimate.jsonl")}


@pytest.mark.usefixtures("environment")
def test_an_estimate_writes_what_can_be_counted_and_tells_what_cannot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def figures_of(files: Sequence[Path], overrides: Sequence[str], gpus: Sequence[Gpu]) -> list[dict[str, Any]]:
        if gpus[0].name == "A100, 40 GB":
            raise UserError("no room")
        return [dict(_ROWS["peclr_rn50", gpu.name]) for gpu in gpus]

    monkeypatch.setattr(estimate, "figures_of", figures_of)
    assert run_cli("bench-gpu", "--estimate", "--out", str(tmp_path), "-c", "peclr_rn50") == 1
    shown = capsys.readouterr()
    assert "no room" in shown.err
    assert "nothing was timed on a card" in shown.out
    names = [gpu.name for gpu in estimate.GPUS]
    assert [row["gpu"] for row in read_rows(tmp_path / "gpu_estimate.jsonl")] == [
        name for name in names if name != "A100, 40 GB"
    ]


_FAST = "peclr_rn50 on A100, 80 GB"
"""All its graphs are kept, so that it is counted in the shortest time."""


@pytest.mark.usefixtures("environment")
@pytest.mark.parametrize(
    ("configuration", "gpus"),
    [
        pytest.param(name, gpus, id=key, marks=() if key == _FAST else pytest.mark.slow)
        for name, gpus in product(SHIPPED, estimate.groups())
        for key in [f"{name} on {gpus[0].name}"]
    ],
)
def test_steps_at_full_size_are_as_recorded(configuration: str, gpus: list[Gpu]) -> None:
    """Within 2 %. If this is meant: python cli.py bench-gpu --estimate --out bench/results"""
    for found in estimate.figures_of([Path(configuration)], [], gpus):
        row = _ROWS[configuration, found["gpu"]]
        for key in ("peak_bytes", "held_bytes", "kernels", "flop", "bytes"):
            assert found[key] == pytest.approx(row[key], rel=0.02), key
        assert found["over_all_kept"] == pytest.approx(row["over_all_kept"], abs=0.01)
        assert found["graphs_kept"] == row["graphs_kept"]


@pytest.mark.parametrize(("gpu", "bound"), [("RTX 2080 Ti", 1.36), ("RTX 3090", 1.25), ("RTX 4090", 1.25)])
def test_lack_of_memory_costs_a_resnet50_little(gpu: str, bound: float) -> None:
    """By the computed times, beside a card whose memory keeps all graphs of 2048 images."""
    row = _ROWS["peclr_rn50", gpu]
    assert row["batch"] == 2048
    assert 1 <= row["over_all_kept"] <= bound
