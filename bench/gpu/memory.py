"""The exact batch of 2048 inside the memory of a small card, as the driver sees it, and what that costs.

On a larger card: torch is held to what is left of the small one's memory, and the driver is asked what all of the
process takes, DALI and libraries included.
"""

from __future__ import annotations

import threading
from types import TracebackType
from typing import Final

import torch

from bench.gpu.claims import Claim, Findings, Job, at_most, looked_at
from bench.measure import Rate, memory_mib
from bench.step import Settings, StepBench
from pipelines.sources import load_index
from train.config.pretraining import Config
from train.distributed.world import described_world

_OTHERS_SHARE: Final = 0.25
"""Of a card's memory, what torch leaves to DALI, the libraries and the driver's context."""

_LOOK_EVERY_S: Final = 0.02


def card_of_11_gb(job: Job) -> Findings:
    """ResNet-50."""
    return _measure(job, "peclr_rn50.toml", "rtx_11gb.toml", 11e9)


def card_of_24_gb(job: Job) -> Findings:
    """ResNet-152."""
    return _measure(job, "peclr_rn152.toml", "rtx_24gb.toml", 24e9)


def _measure(job: Job, encoder: str, overlay: str, card_bytes: float) -> Findings:
    device = described_world().device
    before = bytes_in_use(device)
    if device.type == "cuda":
        whole = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, card_bytes * (1 - _OTHERS_SHARE) / whole), device)
    with Highest(device) as highest:
        small = _rate(job, job.config(encoder, overlay))
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(1.0, device)
    large = _rate(job, job.config(encoder, "a100.toml", overrides=["train.compile=false"]))
    return Findings(claims(encoder, card_bytes, before, highest.bytes, small, large, on_gpu=device.type == "cuda"))


def claims(
    encoder: str, card_bytes: float, before: float, highest: float, small: Rate, large: Rate, *, on_gpu: bool
) -> list[Claim]:
    """It fits, whatever else was on the card before, and costs little."""
    name = f"{encoder.removesuffix('.toml')} in {card_bytes / 1e9:.0f} GB"
    return [
        at_most(f"{name}: highest on the device, loader running", (highest - before) / 1e9, card_bytes / 1e9, "GB")
        if on_gpu
        else looked_at(f"{name}: highest of the process on a CPU", f"{highest / 1e9:.2f} GB"),
        at_most(f"{name}: time of an image over that without the limit", large.mean / small.mean, 1.4),
    ]


def _rate(job: Job, config: Config) -> Rate:
    settings = Settings(2, job.seconds(2), job.seconds(1), steps_per_sync=2, comparisons=False)
    bench = StepBench(config, load_index(config.data), described_world(config.train.device), settings)
    return bench.measure([bench.loaded])[0]


def bytes_in_use(device: torch.device) -> float:
    """On a GPU what the driver (NVML) says of all of it; on a CPU what this process takes."""
    return float(torch.cuda.device_memory_used(device)) if device.type == "cuda" else memory_mib() * 2**20


class Highest:
    """Looks again and again at how much of a device is in use.

    Attributes:
        bytes: the most that was seen.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.bytes = 0.0
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> Highest:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._done.set()
        self._thread.join()

    def _look(self) -> None:
        while True:
            self.bytes = max(self.bytes, bytes_in_use(self._device))
            if self._done.wait(_LOOK_EVERY_S):
                return
