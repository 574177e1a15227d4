"""Stages that measure the loader (against a step and other loaders), its views, the step, and memory on small cards."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Final, Literal

import torch

from bench.gpu.claims import Claim, Findings, Job, at_least, at_most, looked_at
from bench.loaders.compare import compare_loaders
from bench.loaders.frames import large_frames
from bench.loaders.ours import LoaderSettings, our_batches
from bench.loaders.parts import parts_of_loader
from bench.measure import Rate, Rounds, Start, measure_in_rounds, memory_mib
from bench.rows import append
from bench.training import report
from bench.training.step import Row, StepBench, cached_rate, wait_for, with_train
from machine.cores import available_cores
from pipelines.sources import load_index
from train.distributed.world import described_world
from train.runs.log import progress_bar

_PEERS: Final = (
    "OpenCV + DataLoader", "OpenCV + DataLoader, lean", "torchvision v2, GPU", "torchvision + kornia, GPU",
)  # fmt: skip
_THREADS: Final = 8

_OTHERS_SHARE: Final = 0.25
"""Share of a card's memory that torch leaves to DALI, the libraries and the driver's context."""

_LOOK_EVERY_S: Final = 0.02


def loader(job: Job, *, sources: str, repeats: int) -> Findings:
    """Measure the loader, a step and other loaders, on images of 224 pixels ("small") or 1280 x 720 ("large")."""
    config = job.config("peclr_rn50.toml", "a100.toml")
    needed = cached_rate(config, job.step_settings())
    if sources == "large":
        config = dataclasses.replace(config, data=large_frames(config.data))
    settings = LoaderSettings(
        cores=available_cores(),
        batch=8 if job.tiny else 256,
        repeats=repeats,
        repeat_s=job.seconds(1),
        warmup_s=job.seconds(0.5),
        only_peers=_PEERS,
        passes=0,
    )
    device = described_world(config.train.device).device
    with progress_bar(f"{sources} sources") as progress:
        row = compare_loaders(config, settings, device=device, sources=sources, step=needed, progress=progress)
    append(job.out / "loader.jsonl", row)
    return {"claims": loader_claims(row), "verdict": row["verdict"]}


def loader_claims(row: dict[str, Any]) -> list[Claim]:
    """Claims: the loader is twice as fast as a step, and three times as fast as OpenCV on the same cores."""
    counts = [int(count) for count in row["threads"]]
    threads = _THREADS if _THREADS in counts else max(counts)
    what = f"loader with {threads} threads, {row['sources']} sources, over what a ResNet-50 step takes"
    made = [at_least(what, row["threads"][str(threads)]["images_per_s"] / row["step_images_per_s"], 2)]
    for peer in row["loaders"][1:]:
        what = f"loader over {peer['name']}, {row['sources']} sources, {row['settings']['cores']} cores"
        made.append(at_least(what, peer["ours_is"][0], 3 if peer["name"].startswith("OpenCV") else 1))
    return made


def views(job: Job, *, repeats: int) -> Findings:
    """Measure both ways to make views on a GPU (`pipelines.gpu_views`): in the loader, and without reading files."""
    config = job.config("peclr_rn50.toml", "a100.toml", overrides=["pipelines.backend=dali"])
    device, batch = described_world(config.train.device).device, 8 if job.tiny else 256
    index = load_index(config.data)
    starts: dict[str, Start] = {}
    ways: tuple[Literal["fused", "graph"], ...] = ("fused", "graph")
    for way in ways:
        changed = dataclasses.replace(config, pipelines=dataclasses.replace(config.pipelines, gpu_views=way))
        starts[f"loader, {way}"] = partial(our_batches, index, changed, batch, device)
        for part in parts_of_loader(index, changed, batch, device):
            if part.name in ("decode + views", "views only"):
                starts[f"{part.name}, {way}"] = part.start
    rounds = Rounds(repeats=repeats, repeat_s=job.seconds(1), warmup_s=job.seconds(0.5))
    with progress_bar("views") as progress:
        measured = measure_in_rounds(list(starts.values()), rounds, progress)
    rates = dict(zip(starts, measured, strict=True))
    return {"claims": views_claims(rates), "images_per_s": {name: rate.images_per_s for name, rate in rates.items()}}


def views_claims(rates: dict[str, Rate]) -> list[Claim]:
    """Claims: one kernel is not slower than the nodes of the DALI graph."""
    made = [
        at_least(f"{what}: fused over graph", rates[f"{what}, fused"].over(rates[f"{what}, graph"]).mean, 1)
        for what in ("loader", "decode + views")
    ]
    return [*made, *(looked_at(name, f"{rate.mean:.0f} images/s") for name, rate in rates.items())]


def step(job: Job, *, file: str, repeats: int) -> Findings:
    """Measure the step of a configuration with a batch of 2048, compiled and not compiled."""
    made: list[Claim] = []
    peak = matrix_peak(described_world().device, 256 if job.tiny else 8192)
    for compiled in (False,) if job.tiny else (False, True):
        config = job.config(file, "a100.toml", overrides=["train.precision=bf16"])
        config = with_train(config, compile=compiled)
        settings = job.step_settings(repeats=repeats, repeat_s=2)
        bench = StepBench(config, load_index(config.data), described_world(config.train.device), settings)
        name = f"{config.encoder.name}{', compiled' if compiled else ''}"
        with progress_bar(name) as progress:
            found = bench.run(progress)
        append(job.out / "train.jsonl", report.as_json([found], config, settings))
        made += step_claims(name, found, peak, first_wait(bench))
        del bench
        torch.compiler.reset()
    return {"claims": made, "matrix_peak_flop_per_s": peak}


def step_claims(name: str, found: Row, peak_flop_per_s: float, waits: str | None) -> list[Claim]:
    """Claims: loader and optimiser take almost none of a step's time, and nothing in a step waits for the device."""
    flop_per_s = found["model_flop_per_s"]
    achieved = f"{flop_per_s / 1e12:.1f} TFLOP/s, {flop_per_s / peak_flop_per_s:.1%} of its matrix peak"
    with_loader = 1 / (1 - found["loader_share"])
    return [
        at_most(f"{name}: step with the loader over step with batches in memory", with_loader, 1.01),
        at_most(f"{name}: share of the time spent waiting for the loader", 100 * found["waited_share"], 1, "%"),
        at_most(f"{name}: share of the step taken by LARS and Adam", 100 * found["optimizer_share"], 3, "%"),
        Claim(f"{name}: operations of a step that wait for the device", waits or "none", "none", waits is None)
        if found["device"].startswith("cuda")
        else looked_at(f"{name}: operations of a step that wait for the device", "cannot be seen on a CPU"),
        looked_at(f"{name}: step of {found['batch']}, recompute = {found['recompute']}", f"{found['step_s'][0]:.4f} s"),
        looked_at(f"{name}: model FLOP/s", achieved),
    ]


def matrix_peak(device: torch.device, side: int) -> float:
    """Measure the FLOP/s of a product of two square bfloat16 matrices: an upper bound for this card."""
    from torch.utils.benchmark import Timer  # this import warns where there is no GPU

    first, second = (torch.randn(side, side, device=device, dtype=torch.bfloat16) for _ in range(2))
    product = Timer("torch.mm(first, second)", globals={"torch": torch, "first": first, "second": second})
    return 2 * side**3 / product.blocked_autorange().median


def first_wait(bench: StepBench) -> str | None:
    """Torch's warning about the first operation in a step that waits for the GPU; None if there is none."""
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


def memory(job: Job, *, encoder: str, overlay: str, card_bytes: float) -> Findings:
    """Measure the memory of the exact batch of 2048, and the time that a small card's limit costs.

    On a larger card, torch is limited to its part of the small card's memory. The driver reports the memory of the
    whole process, with DALI and libraries.
    """
    device = described_world().device
    before = bytes_in_use(device)
    if device.type == "cuda":
        whole = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, card_bytes * (1 - _OTHERS_SHARE) / whole), device)
    with bytes_seen(device) as seen:
        small = _rate_with_loader(job, encoder, overlay)
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(1.0, device)
    large = _rate_with_loader(job, encoder, "a100.toml", overrides=["train.compile=false"])
    on_gpu = device.type == "cuda"
    return {"claims": memory_claims(encoder, card_bytes, before, max(seen), small, large, on_gpu=on_gpu)}


def memory_claims(
    encoder: str, card_bytes: float, before: float, highest: float, small: Rate, large: Rate, *, on_gpu: bool
) -> list[Claim]:
    """Claims: the step fits into the card's memory, and the limit costs little time."""
    name = f"{encoder.removesuffix('.toml')} in {card_bytes / 1e9:.0f} GB"
    return [
        at_most(
            f"{name}: largest memory on the device, with the loader", (highest - before) / 1e9, card_bytes / 1e9, "GB"
        )
        if on_gpu
        else looked_at(f"{name}: largest memory of the process, on a CPU", f"{highest / 1e9:.2f} GB"),
        at_most(f"{name}: time per image over that without the limit", large.mean / small.mean, 1.4),
    ]


def _rate_with_loader(job: Job, *files: str, overrides: Sequence[str] = ()) -> Rate:
    config = job.config(*files, overrides=overrides)
    settings = job.step_settings(repeat_s=2, steps_per_sync=2)
    bench = StepBench(config, load_index(config.data), described_world(config.train.device), settings)
    return bench.time([bench.loaded])[0]


def bytes_in_use(device: torch.device) -> float:
    """Memory in use: of the whole GPU, from its driver (NVML); on a CPU, of this process."""
    return float(torch.cuda.device_memory_used(device)) if device.type == "cuda" else memory_mib() * 2**20


@contextmanager
def bytes_seen(device: torch.device) -> Iterator[list[float]]:
    """Sample the memory in use of a device while the `with` block runs."""
    seen, done = [bytes_in_use(device)], threading.Event()

    def look() -> None:
        while not done.wait(_LOOK_EVERY_S):
            seen.append(bytes_in_use(device))

    looking = threading.Thread(target=look, daemon=True)
    looking.start()
    try:
        yield seen
    finally:
        done.set()
        looking.join()
