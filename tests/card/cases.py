"""Steps and runs on a card of make-believe: `python -m tests.card.cases FILE CASE...` writes what the card saw as JSON.

The process needs the environment of `card_environment`, and TRITON_INTERPRET=1.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from peclr_dali.bench.gpu.card.card import Card, CardTensor, card
from peclr_dali.pipelines.batch import Batch, View
from peclr_dali.pipelines.loader import Loader
from peclr_dali.pipelines.render import dali_graph, renderers, runner
from peclr_dali.pipelines.views.appearance import CHANGES
from peclr_dali.train.config.finetuning import FinetuneConfig
from peclr_dali.train.config.load import load_config
from peclr_dali.train.config.pretraining import Config
from peclr_dali.train.distributed import together
from peclr_dali.train.distributed.world import World
from peclr_dali.train.finetune import finetune
from peclr_dali.train.pretrain import Pretraining, pretrain
from peclr_dali.train.runs.checkpoint import Checkpoints, snapshot
from peclr_dali.train.steps.exact import ExactStep
from tests.command_line import run_cli
from tests.train import tiny_hands, tiny_run, tiny_step
from tests.train.narrow import narrow_resnet18

GPU = torch.device("cuda", 0)
SIDE_PX = 32
STEP = (
    f"geometry.side_px={SIDE_PX}", "encoder.name=resnet18", "encoder.weights=random", "train.batch=8",
    "train.micro_batch=4", "train.epochs=2", "optim.warmup_epochs=1", "optim.lr=1e-3", "projector.hidden=16",
    "projector.dim=8", "train.device=cuda",
)  # fmt: skip

STEPS: dict[str, tuple[str, ...]] = {
    "always": ("train.recompute=always",),
    "never": ("train.recompute=never",),
    "auto": ("train.recompute=auto",),
    "one micro-batch": ("train.micro_batch=8",),
    "bf16": ("train.precision=bf16",),
    "fp16": ("train.precision=fp16",),
    "fp16 recomputed": ("train.precision=fp16", "train.recompute=always"),
    "fp32": ("train.precision=fp32",),
    "fp64": ("train.precision=fp64",),
    "contiguous": ("train.channels_last=false",),
    "SimCLR": ("equivariance.variant=none",),
    "upstream": ("equivariance.variant=upstream",),
    "direct": ("equivariance.variant=direct",),
    "scalar range": ("equivariance.range=scalar", "equivariance.detach_range=false"),
    "VICReg": ("loss.name=vicreg",),
    "weighted NT-Xent": ("loss.name=weighted_nt_xent",),
    "compiled": ("train.compile=true",),
    "LARS on weights": ("optim.lars=weights", "optim.clip=false"),
    "timm": ("encoder.name=timm/test_convnext",),
}
"""Configurations of a step."""
if importlib.util.find_spec("timm") is None:
    del STEPS["timm"]


@dataclass(eq=False)
class Case:
    """A running case: its card, data, a folder for its run, and what was seen: in its phases, and a loss."""

    card: Card
    images: Path
    hands: Path
    out: Path
    phases: dict[str, Any]
    loss: float | None = None

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Keep what the card sees in the `with` block."""
        name += " again" if name in self.phases else ""
        self.card.clear()
        try:
            yield
        finally:
            self.phases[name] = {
                "operators": sum(self.card.operators.values()),
                "mixed": list(self.card.mixed),
                "waits": [[how, callers, times] for (how, callers), times in self.card.waits.items()],
                "copies": [[how, callers, times] for (how, callers), times in self.card.copies.items()],
                "recorded": [[how, callers, times] for (how, callers), times in self.card.recorded.items()],
            }


def step(case: Case, overrides: Sequence[str]) -> None:
    """Two optimiser steps, and all that is done with their state."""
    config = load_config(Config, [], [*STEP, *overrides])
    with case.phase("start"):
        torch.manual_seed(0)
        state = Pretraining(config, World(device=GPU), 10, fresh=True)
    with case.phase("batch"):
        batch = pinned_batch().to(GPU)
    with case.phase("first step"):
        state.step(batch)
    with case.phase("step"):
        result = state.step(batch)
    with case.phase("row of metrics"):
        state.figures(result)
        assert state.weights_are_finite()
    with case.phase("checkpoint"):
        saved, wait = snapshot(state.state_dict())
        wait()
    with case.phase("resume"):
        state.load_state_dict({**saved, "step": state.steps_done, "norm_ranks": 1})
        result = state.step(batch)
    case.loss = result.loss.item()


def loss_on_cpu(case: Case) -> None:
    """The same on the CPU, as a reference."""
    torch.manual_seed(0)
    state = Pretraining(load_config(Config, [], [*STEP, "train.precision=fp32"]), World(), 10, fresh=True)
    for _ in range(3):
        case.loss = state.step(pinned_batch()).loss.item()


def pinned_batch() -> Batch:
    """A batch of STEP as the loader makes it on the CPU."""
    batch = tiny_step.images(8, SIDE_PX)

    def pinned(view: View) -> View:
        image = view.image.contiguous(memory_format=torch.channels_last)
        return View(image.pin_memory(), view.matrix.pin_memory(), view.source_to_view_px.pin_memory())

    return replace(batch, views=tuple(map(pinned, batch.views)))


APPEARANCE = tuple(f"appearance.{column.name.lower()}_probability=0.5" for column in CHANGES)
RARE = ("run.log_every=100", "run.checkpoint_every=100", "run.tensorboard=false")


def run_pretraining(case: Case, *overrides: str, resume: Any = "never", saves: bool = False) -> None:
    """A run of pre-training with the phases of `watched_loop`; one phase if it saves checkpoints on its way."""
    settings = tiny_run.settings(case.images, case.out, "train.epochs=1", "optim.warmup_epochs=0", *RARE)
    config = load_config(Config, [], [*settings, "train.device=cuda", *overrides])
    with nullcontext() if saves else watched_loop(case), case.phase("end"):
        pretrain(config, resume)


@contextmanager
def watched_loop(case: Case) -> Iterator[None]:
    """Phases of a run: "first step" with all before it, "loop", and "end", which is the last step and all after it."""
    steps_of_all_ranks = together.steps_of_all_ranks

    def watched(*arguments: Any) -> Iterator[Any]:
        batches = steps_of_all_ranks(*arguments)
        with case.phase("first step"):
            yield next(batches)
            following = next(batches)
        with case.phase("loop"):
            for batch in batches:
                yield following
                following = batch
        case.card.clear()
        yield following

    with patch("peclr_dali.train.trainer.steps_of_all_ranks", watched):
        yield


def pretrain_pairs(case: Case) -> None:
    """Two versions of a hand in a row, and a loss that takes their keypoints."""
    data = (f"data.root={case.hands}", "data.source=freihand", "data.positive=version", "loss.name=weighted_nt_xent")
    run_pretraining(case, *data, "pipelines.gpu_views=graph")


def probe_and_resume(case: Case) -> None:
    """Hands with labels, and probes; then the run goes on from its checkpoint before the last one."""
    overrides = (
        f"data.root={case.hands}", "data.source=freihand", "probe.every_epochs=2", "train.epochs=2", "train.batch=24",
        "train.micro_batch=12", "pipelines.gpu_views=graph", "run.checkpoint_every=2",
    )  # fmt: skip
    run_pretraining(case, *overrides, saves=True)
    Checkpoints(case.out / "checkpoints", keep=1).paths()[-1].unlink()
    run_pretraining(case, *overrides, resume="auto", saves=True)


def run_finetuning(case: Case, *overrides: str) -> None:
    """A run of fine-tuning with validation, and what is done with its network."""
    settings = tiny_hands.settings(case.hands, case.out, "train.epochs=1", *RARE, "train.device=cuda", *overrides)
    with watched_loop(case), case.phase("end"):
        finetune(load_config(FinetuneConfig, [], settings))
    pictures = str(case.hands / "training" / "rgb" / "0000000[01].jpg")
    for command, *words in (("predict", pictures), ("evaluate",), ("evaluate", "--crop", "two-pass")):
        with case.phase(command):
            assert run_cli(command, str(case.out), *words, "--out", str(case.out.with_suffix(f".{command}"))) == 0


def broken(change: Any) -> Callable[[Case], None]:
    """A step, or a run, with a change of the code."""

    def run(case: Case) -> None:
        with change:
            run_pretraining(case, "pipelines.backend=cpu")

    return run


def pixels_on_cpu() -> Any:
    to = Batch.to

    def to_but_pixels(self: Batch, device: Any) -> Batch:
        moved = to(self, device)
        views = (replace(new, image=old.image) for new, old in zip(moved.views, self.views, strict=True))
        return replace(moved, views=tuple(views))

    return patch.object(Batch, "to", to_but_pixels)


def item_in_step() -> Any:
    loss_and_gradient = ExactStep._loss_and_gradient

    def with_item(self: Any, local: Tensor, batch: Any) -> Any:
        found = loss_and_gradient(self, local, batch)
        assert found[0].item() != 0
        return found

    return patch.object(ExactStep, "_loss_and_gradient", with_item)


def item_beside_the_gradient() -> Any:
    gradient = Pretraining.gradient

    def with_item(self: Any, batch: Batch) -> Any:
        found = gradient(self, batch)
        assert found.loss.item() != 0
        return found

    return patch.object(Pretraining, "gradient", with_item)


def unpinned_pixels() -> Any:
    def empty(self: Loader, buffers: Any) -> Tensor:
        return torch.empty(buffers.shape, dtype=torch.uint8)

    return patch.object(Loader, "_empty_pixels", empty)


ASKS: dict[str, Callable[[Tensor], Any]] = {
    "item": Tensor.item, "tolist": lambda t: t.tolist(), "cpu": Tensor.cpu, "to": lambda t: t.to("cpu"),
    "float": float, "bool": bool, "nonzero": lambda t: t.nonzero(), "mask": lambda t: t[t > 0],
    "masked_select": lambda t: t.masked_select(t > 0), "where": lambda t: torch.where(t > 0), "unique": torch.unique,
    "equal": lambda t: torch.equal(t, t), "allclose": lambda t: torch.allclose(t, t),
    "synchronize": lambda t: torch.cuda.synchronize(), "stream": lambda t: torch.cuda.current_stream().synchronize(),
}  # fmt: skip
"""What the host waits for."""
COPIES: dict[str, Callable[[Tensor], Any]] = {
    "pageable": lambda t: torch.ones(2).to(GPU, non_blocking=True),
    "waiting": lambda t: torch.ones(2).pin_memory().to(GPU), "into": lambda t: t.copy_(torch.ones(2)),
    "number": lambda t: torch.tensor([3.0], device=GPU), "rows": lambda t: t[torch.tensor([1, 0])],
}  # fmt: skip
"""Copies to the card that are not asynchronous from pinned memory."""
FREE: dict[str, Callable[[Tensor], Any]] = {
    "pinned": lambda t: torch.ones(2).pin_memory().to(GPU, non_blocking=True),
    "arithmetic": lambda t: (t * 2 + t).sum(),
    "to pinned": lambda t: torch.empty(2, pin_memory=True).copy_(t, non_blocking=True),
    "rows of the card": lambda t: t[torch.zeros(2, dtype=torch.int64, device=GPU)],
}  # fmt: skip
"""What neither waits nor copies so."""


def ask(case: Case) -> None:
    """Each of the above in a phase of its own."""
    tensor = torch.ones(2, device=GPU)
    for name, does in (ASKS | COPIES | FREE).items():
        with case.phase(name):
            does(tensor[:1] if name in ("item", "float", "bool") else tensor)


CASES: dict[str, Callable[[Case], None]] = {
    **{name: partial(step, overrides=overrides) for name, overrides in STEPS.items()},
    "questions": ask,
    "loss on the CPU": loss_on_cpu,
    "pretrain, views on the CPU": lambda case: run_pretraining(case, "pipelines.backend=cpu"),
    "pretrain, views by the graph": lambda case: run_pretraining(case, "pipelines.gpu_views=graph", *APPEARANCE),
    "pretrain, fused views": lambda case: run_pretraining(case, "pipelines.gpu_views=fused", *APPEARANCE),
    "pretrain, pairs": pretrain_pairs,
    "pretrain, probe": probe_and_resume,
    "finetune": run_finetuning,
    "finetune, frozen": lambda case: run_finetuning(case, "train.frozen=true", "pose.head=mlp", "train.precision=fp16"),
    "broken: a tensor on the CPU": broken(pixels_on_cpu()),
    "broken: item": broken(item_in_step()),
    "broken: item beside the gradient": broken(item_beside_the_gradient()),
    "broken: an unpinned copy": broken(unpinned_pixels()),
}


@contextmanager
def dali_on_the_card() -> Iterator[None]:
    """DALI's graph runs on the CPU. Its images count as the card's, and Triton's kernel is interpreted."""
    from triton.runtime import interpreter

    from peclr_dali.pipelines.render import gpu_kernel

    def on_cpu(build: Any) -> Any:
        return lambda settings, *rest: build(replace(settings, device="cpu", device_id=None), *rest)

    def on_card(given: Any) -> CardTensor:
        return CardTensor(from_dlpack(given))

    def call(self: Any, *given: Any) -> Any:
        return self.rewrite()(*given)

    class Kernel:
        def __getitem__(self, grid: Any) -> Any:
            launch = kernel[grid]
            return lambda *tables, **given: launch(*(table.behind for table in tables), **given)

    kernel = gpu_kernel._make_pixels
    interpreted = interpreter.InterpretedFunction
    with ExitStack() as stack:
        # Triton would patch its whole language again for every call of a function in the kernel.
        stack.enter_context(patch.object(interpreted, "__call__", call))
        stack.enter_context(patch.object(gpu_kernel, "_PIXELS_AT_ONCE", SIDE_PX**2))
        for module in (renderers, runner):
            stack.enter_context(patch.object(module, "decode_pipeline", on_cpu(dali_graph.decode_pipeline)))
        stack.enter_context(patch.object(renderers, "view_pipeline", on_cpu(dali_graph.view_pipeline)))
        stack.enter_context(patch.object(renderers, "from_dlpack", on_card))
        stack.enter_context(patch.object(gpu_kernel, "_make_pixels", Kernel()))
        yield


def main(out: Path, names: list[str]) -> None:
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    with narrow_resnet18(), tempfile.TemporaryDirectory() as folder:
        images, hands = Path(folder) / "images", Path(folder) / "hands"
        tiny_run.write_images(images)
        tiny_hands.write_hands(hands, 12)
        for number, name in enumerate(names):
            error = None
            with card() as gpu, dali_on_the_card():
                case = Case(gpu, images, hands, Path(folder) / f"run{number}", {})
                try:
                    CASES[name](case)
                except Exception:
                    error = traceback.format_exc()
            found[name] = {"phases": case.phases, "loss": case.loss, "error": error}
    out.write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
