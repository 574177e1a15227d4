"""The training step on a GPU: what the loader and the optimiser add to it, and where the rest goes."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from bench import step_report
from bench.gpu.claims import Claim, Findings, Job, at_most, looked_at
from bench.step import Settings, StepBench, StepFigures, with_train
from pipelines.sources import load_index
from train.distributed.world import described_world
from train.runs.log import progress_bar

_LARGEST: Final = 12
"""Operators that the profile names; the rest is added up."""


def resnet50(job: Job) -> Findings:
    """The paper's smaller encoder."""
    return _measure(job, "peclr_rn50.toml", repeats=3)


def resnet152(job: Job) -> Findings:
    """The paper's larger encoder."""
    return _measure(job, "peclr_rn152.toml", repeats=2)  # its steps are long, and so are their compilations


def _measure(job: Job, file: str, repeats: int) -> Findings:
    made: list[Claim] = []
    rows, profiles = [], {}
    peak = matrix_peak(described_world().device, 256 if job.tiny else 8192)
    for compiled in (False,) if job.tiny else (False, True):
        config = job.config(file, "a100.toml", overrides=["train.precision=bf16"])
        config = with_train(config, compile=compiled)
        settings = Settings(repeats, job.seconds(2), job.seconds(1), steps_per_sync=4, comparisons=False)
        bench = StepBench(config, load_index(config.data), described_world(config.train.device), settings)
        name = f"{config.encoder.name}{', compiled' if compiled else ''}"
        with progress_bar(name) as progress:
            found = bench.run(progress)
        rows.append(step_report.as_json([found], config, settings))
        waits = first_wait(bench)
        profiles[name] = profile_of(bench)
        made += claims(name, found, peak, waits)
        del bench
        torch.compiler.reset()
    return Findings(made, {"train": rows}, {"matrix_peak_flop_per_s": peak, "profiles": profiles})


def claims(name: str, found: StepFigures, peak_flop_per_s: float, waits: str | None) -> list[Claim]:
    """The loader and the optimiser do not show, and nothing in a step waits for the device."""
    achieved = f"{found.flop_per_s / 1e12:.1f} TFLOP/s, {found.flop_per_s / peak_flop_per_s:.1%} of its matrix peak"
    with_loader = found.cached.over(found.loaded).mean
    return [
        at_most(f"{name}: step with the loader over step with batches at hand", with_loader, 1.01),
        at_most(f"{name}: of the time with the loader, waited", 100 * found.waited_share, 1, "%"),
        at_most(f"{name}: of the step, LARS and Adam", 100 * found.optimizer_share, 3, "%"),
        Claim(f"{name}: waits for the device in a step", waits or "none", "none", waits is None)
        if found.device.startswith("cuda")
        else looked_at(f"{name}: waits for the device in a step", "not to be seen on a CPU"),
        looked_at(f"{name}: step of {found.batch}, recompute = {found.recompute}", f"{found.step_s.mean:.4f} s"),
        looked_at(f"{name}: model FLOP/s", achieved),
    ]


def matrix_peak(device: torch.device, side: int, repeats: int = 10) -> float:
    """FLOP/s of a product of two square bfloat16 matrices of normal numbers: what the card gives at best."""
    first, second = (torch.randn(side, side, device=device, dtype=torch.bfloat16) for _ in range(2))
    seconds = [seconds_of(lambda: torch.mm(first, second), device) for _ in range(repeats + 3)]
    return float(2 * side**3 / statistics.median(seconds[3:]))


def seconds_of(work: Callable[[], object], device: torch.device) -> float:
    """How long some work takes, waited for."""
    wait_for(device)
    began = time.perf_counter()
    work()
    wait_for(device)
    return time.perf_counter() - began


def wait_for(device: torch.device) -> None:
    """Until the device has done what is queued."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def first_wait(bench: StepBench) -> str | None:
    """What torch says of the first thing in a step that waits for the GPU; None if nothing does."""
    if bench.world.device.type != "cuda":
        return None
    wait_for(bench.world.device)
    torch.cuda.set_sync_debug_mode("error")
    try:
        bench.state.step(bench.batches[0])
    except RuntimeError as error:
        return str(error).splitlines()[0]
    finally:
        torch.cuda.set_sync_debug_mode("default")
        wait_for(bench.world.device)
    return None


def profile_of(bench: StepBench, steps: int = 2) -> list[dict[str, Any]]:
    """Which operators a step's time on the device goes to, the largest first; then the others, then nothing running.

    On a GPU as its kernels took; on a CPU, where operators run one after the other, as the host saw them.
    """
    on_gpu = bench.world.device.type == "cuda"
    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA] if on_gpu else [ProfilerActivity.CPU]
    wait_for(bench.world.device)
    with profile(activities=activities, acc_events=True) as seen:
        began = time.perf_counter()
        for number in range(steps):
            bench.state.step(bench.batches[number % len(bench.batches)])
        wait_for(bench.world.device)
        wall_s = time.perf_counter() - began
    times = {
        event.key: 1e-6 * (event.self_device_time_total if on_gpu else event.self_cpu_time_total)
        for event in seen.key_averages()
        if event.device_type == DeviceType.CPU  # a kernel's time is that of the operator that started it
    }
    return shares(times, wall_s)


def shares(times_s: dict[str, float], wall_s: float, largest: int = _LARGEST) -> list[dict[str, Any]]:
    """Names and shares of the largest times, of the others together, and of what is left of the time that passed."""
    ordered: Sequence[tuple[str, float]] = sorted(times_s.items(), key=lambda item: -item[1])
    named = [*ordered[:largest], ("all others", sum(time_s for _, time_s in ordered[largest:]))]
    named.append(("nothing running", max(wall_s - sum(times_s.values()), 0.0)))
    return [{"what": name, "share": round(time_s / wall_s, 4)} for name, time_s in named]
