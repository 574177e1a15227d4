"""Small computations on a card of make-believe: `python -m tests.bench.counted CASE...` prints what was counted as
JSON.

The process needs the environment of `card_environment`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

from peclr_dali.bench.gpu.card.card import CUDA
from peclr_dali.bench.gpu.estimate import Count, counting, make_batch
from peclr_dali.pipelines.batch import Batch
from peclr_dali.train.config.load import load_config
from peclr_dali.train.config.pretraining import Config
from peclr_dali.train.distributed.world import World
from peclr_dali.train.pretrain import Pretraining
from peclr_dali.train.steps.memory import HEADROOM_BYTES, with_graph_bytes
from tests.train.narrow import narrow_resnet18

SMALL = (
    "geometry.side_px=32", "encoder.name=resnet18", "encoder.weights=random", "train.batch=64", "train.micro_batch=32",
    "train.precision=fp32",
)  # fmt: skip


def figures(count: Count) -> dict[str, int]:
    totals = {name: count.total(name) for name in ("kernels", "flop", "bytes")}
    return {"live_bytes": count.live_bytes, "peak_bytes": count.peak_bytes, **totals}


def by_hand() -> dict[str, Any]:
    """A convolution of two 8 x 8 images, its ReLU, and the gradient of the weights."""
    with counting(1e9, has_data=False) as (_, count):
        images = torch.zeros(2, 3, 8, 8, device=CUDA)
        weights = torch.zeros(4, 3, 3, 3, device=CUDA, requires_grad=True)
        count.restart()
        kept = F.conv2d(images, weights).relu()
        kept.sum().backward()  # type: ignore[no-untyped-call]
        return figures(count)


def lists() -> dict[str, Any]:
    """Operators on lists of 100 tensors."""
    with counting(1e9, has_data=False) as (_, count):
        first, second = ([torch.zeros(64, device=CUDA) for _ in range(100)] for _ in range(2))
        count.restart()
        torch._foreach_add_(first, second)
        two_lists = count.total("kernels")
        torch._foreach_mul_(first, torch.zeros(100, device=CUDA).unbind())
        return {"two_lists": two_lists, "one_by_one": count.total("kernels") - two_lists - 1}


def settled(world: World, recompute: str) -> tuple[Pretraining, Batch]:
    """A state after its first step, and a batch for it."""
    with narrow_resnet18():
        config = load_config(Config, [], [*SMALL, f"train.recompute={recompute}"])
        state, batch = Pretraining(config, world, 10, fresh=True), make_batch(64, 32, world.device)
    state.step(batch)
    state.network.zero_grad()  # the profiler does not see the end of what began before it
    return state, batch


def profiled_peak(state: Pretraining, batch: Batch) -> int:
    """Bytes that a step adds on the CPU to those that are held, as torch's profiler sees them."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as seen:
        state.step(batch)
    assert seen.profiler is not None
    events: Iterable[Any] = seen.profiler.kineto_results.events()
    return int(max(accumulate(event.nbytes() for event in events if event.name() == "[memory]")))


def profiled(recompute: str) -> dict[str, Any]:
    """The same as counted, and as the profiler sees them of the tensors behind the card."""
    with counting(1e12, block_bytes=1) as (_, count):
        state, batch = settled(World(device=CUDA), recompute)
        held = count.live_bytes
        count.restart()
        behind = profiled_peak(state, batch)
    return {"counted": count.peak_bytes - held, "behind": behind}


def _fill(held: list[Batch], *_: Any) -> None:
    held += [make_batch(64, 32) for _ in range(len(held), 4)]


def graphs_kept() -> dict[str, Any]:
    """Of four graphs where two fit: in a new run, in a resumed one, and beside all batches that a loader may hold."""
    config = load_config(Config, [], [*SMALL, "train.micro_batch=16"])

    def state() -> Pretraining:
        return Pretraining(config, World(device=CUDA), 10, fresh=True)

    with narrow_resnet18():
        with counting(1e12) as (_, count):
            first, held_bytes = state(), count.live_bytes
            batch = make_batch(64, 32)
            _, graph_bytes = with_graph_bytes(first.network, lambda: first.exact.embed(batch, slice(0, 16)))
            first.step(batch)
            saved = {**first.state_dict(), "step": 1, "norm_ranks": 1}
        reserved, weights = first.exact.reserved_bytes, sum(p.nbytes for p in first.network.parameters())
        needed, found = HEADROOM_BYTES + held_bytes + reserved + 4 * weights + 2 * graph_bytes, {}
        for name in ("new", "resumed", "beside the loader"):
            with counting(needed + 50_000):
                one = state()
                if name == "resumed":
                    one.load_state_dict(saved)
                held = [make_batch(64, 32)]
                if name == "beside the loader":  # its thread makes the other batches while the first graph is measured
                    one.network.register_forward_hook(partial(_fill, held))
                one.step(held[0])
                found[name] = one.exact.kept_graphs
    return found


CASES: dict[str, Callable[[], dict[str, Any]]] = {
    "by hand": by_hand,
    "lists": lists,
    "graphs kept": graphs_kept,
    **{how: partial(profiled, how) for how in ("never", "always")},
}

if __name__ == "__main__":
    print(json.dumps({name: CASES[name]() for name in sys.argv[1:]}))
