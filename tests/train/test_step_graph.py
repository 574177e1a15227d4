"""A step recorded as one CUDA graph, on a CPU: what torch computes is recorded, and replayed in the same memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from peclr_dali.errors import UserError
from peclr_dali.pipelines.batch import Batch
from peclr_dali.train.config.load import load_config
from peclr_dali.train.config.pretraining import Config
from peclr_dali.train.distributed.world import World
from peclr_dali.train.pretrain import Pretraining, _bytes_of_batches, is_recorded
from peclr_dali.train.steps.step_graph import StepGraph
from tests.train.tiny_run import TINY
from tests.train.tiny_step import images, part

pytestmark = pytest.mark.usefixtures("narrow")


class Recorded(TorchDispatchMode):
    """torch.cuda.CUDAGraph on a CPU: the operators in the `with` block, with their tensors.

    While a GPU records, nothing is computed. So at the end of the block, what was changed is as before.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, Any]] = []
        self._before: list[tuple[Tensor, Tensor]] = []

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if operator._schema.is_mutable or "batch_norm" in operator.name():  # whose schema says nothing of its buffers
            given = [one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
            self._before += [(one.detach(), one.clone()) for one in given]
        result = operator(*args, **(kwargs or {}))
        self.calls.append((operator, args, kwargs or {}, result))
        return result

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        for changed, before in reversed(self._before):
            changed.copy_(before)

    @torch.no_grad()
    def replay(self) -> None:
        for operator, args, kwargs, result in self.calls:
            for then, now in zip(tree_leaves(result), tree_leaves(operator(*args, **kwargs)), strict=True):
                if isinstance(then, Tensor) and then is not now:
                    then.copy_(now)


@pytest.fixture(autouse=True)
def recording(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def graph(recorded: Recorded, *, stream: str, capture_error_mode: str) -> Iterator[None]:
        assert (stream, capture_error_mode) == ("urgent", "thread_local")  # DALI's threads allocate meanwhile
        with recorded:
            yield

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Recorded)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device, priority: {-1: "urgent"}[priority])
    monkeypatch.setattr(torch.cuda, "graph", graph)


def states(*overrides: str) -> tuple[Pretraining, Pretraining]:
    """A plain one and one that is recorded, with the same weights."""
    config = load_config(Config, [], [*TINY, "geometry.side_px=8", "optim.warmup_epochs=0", *overrides])
    both = []
    for _ in range(2):
        torch.manual_seed(0)
        both.append(Pretraining(config, World(), 10, fresh=True))
    both[1]._graph = StepGraph(both[1].network, both[1].own_work)
    return both[0], both[1]


def batch(seed: int) -> Batch:
    """Others with each seed: all tensors of both views."""
    generator = torch.Generator().manual_seed(seed)
    made = images(12)
    for view in made.views:
        view.image = torch.randint(0, 256, view.image.shape, generator=generator, dtype=torch.uint8)
        view.matrix = view.matrix + 0.1 * torch.rand(view.matrix.shape, generator=generator)
        view.source_to_view_px = view.source_to_view_px + torch.rand(view.matrix.shape, generator=generator)
    return made


@pytest.mark.parametrize("precision", ["fp64", "fp32"])
@pytest.mark.parametrize("recompute", ["never", "always"])
def test_a_replayed_step_is_the_step(recompute: str, precision: str) -> None:
    """On other batches than the recorded one, while the weights change; earlier results stay."""
    plain, recorded = states(f"train.recompute={recompute}", f"train.precision={precision}")
    batches = [batch(seed) for seed in range(6)]
    kept = [state.step(seen) for seen in batches for state in (plain, recorded)]
    for expected, found in zip(kept[::2], kept[1::2], strict=True):
        assert torch.equal(found.loss, expected.loss)
        assert torch.equal(found.embeddings, expected.embeddings)
        assert (found.recompute_difference is None) == (recompute == "never")
    assert len({found.loss.item() for found in kept}) == 6
    assert torch.equal(batches[2].views[1].image, batch(2).views[1].image)  # also the one that was recorded
    for ours, theirs in zip(recorded.network.state_dict().values(), plain.network.state_dict().values(), strict=True):
        assert torch.equal(ours, theirs)


def test_others_may_write_gradients_meanwhile() -> None:
    """As a benchmark does with another loss; and the recorded step runs no Python."""
    plain, recorded = states()
    for seed in range(5):
        expected, found = plain.gradient(batch(seed)), recorded.gradient(batch(seed))
        assert torch.equal(found.loss, expected.loss)
        for ours, theirs in zip(recorded.network.parameters(), plain.network.parameters(), strict=True):
            assert ours.grad is not None
            assert theirs.grad is not None
            assert torch.equal(ours.grad, theirs.grad)
            ours.grad = None
        if seed == 2:
            recorded.exact.embed = lambda *_: pytest.fail("the step was not replayed")


def test_a_recording_is_not_timed_and_a_replay_is() -> None:
    """An event in a CUDA graph cannot be read."""
    _, recorded = states()
    for _ in range(2):
        recorded.gradient(batch(0))
    recorded.own_work.take_s()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Recorded, "replay", lambda _: None)
        patch.setattr("peclr_dali.train.steps.stopwatch.time.perf_counter", iter([1.0, 3.0]).__next__)
        recorded.gradient(batch(0))
    assert recorded.own_work.take_s() == 2


@pytest.mark.parametrize(
    ("device", "world_size", "settings", "expected"),
    [
        ("cuda", 1, ["train.cuda_graph=true"], True),
        ("cuda", 1, [], False),
        ("cpu", 1, ["train.cuda_graph=true"], False),
        ("cuda", 2, ["train.cuda_graph=true"], False),
    ],
)
def test_what_is_recorded(device: str, world_size: int, settings: list[str], expected: bool) -> None:
    """One GPU. A batch more is then held."""
    world = World(world_size=world_size, device=torch.device(device))
    config, plain = (load_config(Config, [], [*TINY, *more]) for more in (settings, []))
    assert is_recorded(config, world) == expected
    held, without = (_bytes_of_batches(one, world) for one in (config, plain))
    assert held == without * (1 + expected / 4)  # two are made ahead, one is in the making, one in use


def test_what_cannot_be_recorded_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch ends the recording with an error of its own."""
    _, recorded = states()
    for _ in range(2):
        recorded.gradient(batch(0))

    @contextmanager
    def graph(*_: Any, **__: Any) -> Iterator[None]:
        try:
            yield
        finally:
            raise RuntimeError("capture was\ninvalidated")

    monkeypatch.setattr(torch.cuda, "graph", graph)
    with pytest.raises(UserError, match=r"recorded as a CUDA graph \(capture was invalidated\): set train.cuda_graph"):
        recorded.gradient(batch(0))
    monkeypatch.setattr(recorded.exact, "embed", Mock(side_effect=torch.OutOfMemoryError("no\nmemory")))
    with pytest.raises(UserError, match=r"recorded as a CUDA graph \(no memory\): set train.cuda_graph"):
        recorded.gradient(batch(0))
    assert not recorded.own_work.is_off


def test_other_shapes_are_refused() -> None:
    _, recorded = states()
    for seed in range(3):
        recorded.gradient(batch(seed))
    with pytest.raises(ValueError, match=r"tensor of \(4, 3, 8, 8\), but the recorded one has \(12, 3, 8, 8\)"):
        recorded.gradient(part(batch(0), range(4)))
