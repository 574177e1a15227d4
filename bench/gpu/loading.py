"""The loader on a GPU, beside what a step needs and what other loaders make."""

from __future__ import annotations

import dataclasses

from bench import report, step
from bench.frames import large_frames
from bench.gpu.claims import Claim, Findings, Job, at_least
from bench.loader import Report, Settings, bench_loader
from bench.measure import Rate
from train.distributed.world import described_world
from train.runs.log import progress_bar

_PEERS = (
    "OpenCV + DataLoader", "OpenCV + DataLoader, lean", "torchvision v2, GPU", "torchvision + kornia, GPU",
)  # fmt: skip
_THREADS = 8


def small(job: Job) -> Findings:
    """Sources of 224 pixels."""
    return _measure(job, "small", repeats=3)


def large(job: Job) -> Findings:
    """Sources of 1280 x 720 pixels, a hand in each."""
    return _measure(job, "large", repeats=2)


def _measure(job: Job, sources: str, repeats: int) -> Findings:
    config = job.config("peclr_rn50.toml", "a100.toml")
    needed = step.cached_rate(config, step.Settings(2, job.seconds(1), job.seconds(1), steps_per_sync=4))
    if sources == "large":
        config = dataclasses.replace(config, data=large_frames(config.data))
    settings = Settings(
        job.cores,
        batch=8 if job.tiny else 256,
        repeats=repeats,
        repeat_s=job.seconds(1),
        warmup_s=job.seconds(0.5),
        only_peers=_PEERS,
        passes=0,
    )
    device = described_world(config.train.device).device
    with progress_bar(f"{sources} sources") as progress:
        found = bench_loader(config, settings, device=device, step=needed, progress=progress)
    row = report.as_json(found, config, sources)
    return Findings(claims(found, needed, sources), {"loader": [row]}, {"verdict": found.verdict})


def claims(found: Report, needed: Rate, sources: str) -> list[Claim]:
    """Twice what a step needs, and three times what OpenCV makes of the same cores."""
    threads = _THREADS if _THREADS in found.threads else max(found.threads)
    what = f"loader with {threads} threads, {sources} sources, over what a ResNet-50 step takes"
    made = [at_least(what, found.threads[threads].rate.mean / needed.mean, 2)]
    for peer in found.peers:
        ratio = found.ours.rate.over(peer.rate).mean
        what = f"loader over {peer.name}, {sources} sources, {found.settings.cores} cores"
        made.append(at_least(what, ratio, 3 if peer.name.startswith("OpenCV") else 1))
    return made
