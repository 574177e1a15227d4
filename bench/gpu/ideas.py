"""What might make the step or the loader faster: each idea with its prediction, tried on the card."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch

from bench.gpu.claims import Claim, Findings, Job, looked_at
from bench.loader import our_batches
from bench.measure import measure
from bench.step import Settings, StepBench
from pipelines.config import PipelinesConfig
from pipelines.sources import load_index
from train.config.pretraining import Config
from train.distributed.world import described_world


@dataclass(frozen=True)
class Idea:
    """One change to the step.

    Attributes:
        name: in words.
        prediction: what it should change, written before it was tried.
        overrides: of the configuration.
        change: of what was built from it.
    """

    name: str
    prediction: str
    overrides: tuple[str, ...] = ()
    change: Callable[[StepBench], None] = lambda bench: None


def _cuda_graphs(bench: StepBench) -> None:
    bench.state.contrastive.network = torch.compile(bench.state.network, mode="reduce-overhead")  # type: ignore[assignment]


def _looping_adam(bench: StepBench) -> None:
    optimizer = bench.state.optimizer
    for group in optimizer.inner.param_groups:
        group["fused"], group["foreach"] = False, True


def _cudnn_benchmark(bench: StepBench) -> None:
    torch.backends.cudnn.benchmark = True


IDEAS: Final = (
    Idea("as configured, not compiled", "what the others are compared with"),
    Idea("channels-first", "slower: convolutions in 16 bits want channels last", ("train.channels_last=false",)),
    Idea("torch.compile", "faster by the elementwise passes around batch norm", ("train.compile=true",)),
    Idea("CUDA graphs", "as torch.compile: at this size the host is ahead of the GPU anyway", (), _cuda_graphs),
    Idea("cuDNN tries its kernels", "a few per cent: its heuristics know these sizes", (), _cudnn_benchmark),
    Idea("Adam in a loop of foreach kernels", "no change: the optimiser is under 3 % of the step", (), _looping_adam),
    Idea("apex's FusedAdam", "no change, for the same reason", ("optim.backend=apex",)),
    Idea("all graphs kept", "a quarter less: no second forward pass, if they fit", ("train.recompute=never",)),
    Idea("graphs never kept", "as configured, or a third more", ("train.recompute=always",)),
    Idea("micro-batches of 256", "a few per cent: another function, larger kernels", ("train.micro_batch=256",)),
    Idea("as configured, again", "how much the machine drifts"),
)

LOADER_IDEAS: Final[dict[str, dict[str, Any]]] = {
    "loader, as configured": {},
    "loader, prefetch 1": {"prefetch": 1},
    "loader, prefetch 4": {"prefetch": 4},
    "loader, DALI batches of 128": {"batch": 128},
    "loader, DALI batches of 1024": {"batch": 1024},
}


def try_ideas(job: Job) -> Findings:
    """Every idea alone; one that cannot be tried says why."""
    tried = [_try(job, idea) for idea in (IDEAS[:2] if job.tiny else IDEAS)]
    tried += [_try_loader(job, name, changed) for name, changed in LOADER_IDEAS.items()]
    made: list[Claim] = [looked_at(one["idea"], one["outcome"]) for one in tried]
    return Findings(made, details={"ideas": tried})


def _try(job: Job, idea: Idea) -> dict[str, str]:
    overrides = ["train.precision=bf16", "train.compile=false", *idea.overrides]
    try:
        config = job.config("peclr_rn50.toml", "a100.toml", overrides=overrides)
        outcome = f"{_images_per_s(job, config, idea):.0f} images/s"
    except Exception as error:  # whatever it is, it is the outcome of this idea and not of the others
        outcome = f"not to be had: {str(error).splitlines()[0][:160] if str(error) else type(error).__name__}"
    finally:
        torch.backends.cudnn.benchmark = False
        torch.compiler.reset()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    return {"idea": idea.name, "prediction": idea.prediction, "outcome": outcome}


def _images_per_s(job: Job, config: Config, idea: Idea) -> float:
    settings = Settings(2, job.seconds(1), job.seconds(1), steps_per_sync=4, comparisons=False)
    bench = StepBench(config, load_index(config.data), described_world(config.train.device), settings)
    idea.change(bench)
    return bench.measure([bench.steps(bench.state.step)])[0].mean


def _try_loader(job: Job, name: str, changed: dict[str, Any]) -> dict[str, str]:
    config = job.config("peclr_rn50.toml", "a100.toml")
    pipelines: PipelinesConfig = dataclasses.replace(config.pipelines, **({} if job.tiny else changed))
    config = dataclasses.replace(config, pipelines=pipelines)
    index, device = load_index(config.data), described_world(config.train.device).device
    batch = config.train.batch
    rate = measure(
        lambda: our_batches(index, config, batch, device), warmup_s=job.seconds(1), repeat_s=job.seconds(1), repeats=2
    )
    return {"idea": name, "prediction": "no change beyond a few per cent", "outcome": f"{rate.mean:.0f} images/s"}
