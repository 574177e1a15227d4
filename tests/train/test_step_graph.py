"""A step recorded as CUDA graphs, on a CPU: what torch computes is recorded, and replayed in the same memory."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from peclr_dali.errors import UserError
from peclr_dali.train.config.load import load_config
from peclr_dali.train.config.pretraining import Config
from peclr_dali.train.distributed.world import World, buckets, described_world, joined
from peclr_dali.train.pretrain import _bytes_of_batches, is_recorded
from peclr_dali.train.steps import micro_batches
from peclr_dali.train.steps.step_graph import StepGraph
from tests.train import ranks
from tests.train.narrow import narrow_resnet18
from tests.train.tiny_run import TINY
from tests.train.tiny_step import Pretraining, assert_same, gradients, images, part

pytestmark = pytest.mark.usefixtures("narrow")


class Recorded(TorchDispatchMode):
    """torch.cuda.CUDAGraph on a CPU: the operators in the `with` block, with their tensors.

    While a GPU records, nothing is computed. So at the end of the block, what was changed is as before.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, Any]] = []
        self.place: tuple[object, object] | None = None  # its pool and stream
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
            changed.data.copy_(before)  # unseen by autograd, which may go back in a later graph

    @torch.no_grad()
    def replay(self) -> None:
        for operator, args, kwargs, result in self.calls:
            for then, now in zip(tree_leaves(result), tree_leaves(operator(*args, **kwargs)), strict=True):
                if isinstance(then, Tensor) and then is not now:
                    then.copy_(now)


@contextmanager
def on_cpu() -> Iterator[None]:
    """Graphs are recorded on the CPU."""

    @contextmanager
    def graph(recorded: Recorded, *, pool: object, stream: object, capture_error_mode: str) -> Iterator[None]:
        assert capture_error_mode == "thread_local"  # DALI's threads allocate meanwhile
        recorded.place = pool, stream
        with recorded:
            yield
        assert torch._C._current_graph_task_id() == -1  # on a GPU, autograd's thread cannot end what another one began

    with (
        patch.object(torch.cuda, "CUDAGraph", Recorded),
        patch.object(torch.cuda, "Stream", lambda device, priority: {-1: object()}[priority]),
        patch.object(torch.cuda, "graph_pool_handle", object),
        patch.object(torch.cuda, "graph", graph),
    ):
        yield


@pytest.fixture(autouse=True)
def recording() -> Iterator[None]:
    with on_cpu():
        yield


def states(*overrides: str, world: World | None = None) -> tuple[Pretraining, Pretraining]:
    """A plain one and one that is recorded, with the same weights."""
    config = load_config(Config, [], [*TINY, "geometry.side_px=8", "optim.warmup_epochs=0", *overrides])
    plain, recorded = Pretraining(config, world), Pretraining(config, world)
    recorded.step = StepGraph(recorded.exact)
    return plain, recorded


def parts(recorded: Pretraining) -> list[Any]:
    """Graphs, each with the exchange that follows."""
    assert isinstance(recorded.step, StepGraph)
    assert recorded.step._recording is not None
    return recorded.step._recording.recorder.parts


@pytest.mark.parametrize("precision", ["fp64", "fp32"])
@pytest.mark.parametrize("recompute", ["never", "always", "auto"])
def test_a_replayed_step_is_the_step(recompute: str, precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On other batches than the recorded one, while the weights change; earlier results stay."""
    monkeypatch.setattr("peclr_dali.train.steps.exact.free_bytes", lambda *_: 0)  # "auto" keeps one graph
    plain, recorded = states(f"train.recompute={recompute}", f"train.precision={precision}")
    batches = [images(12, seed=seed) for seed in range(6)]
    kept = [state.take_step(seen) for seen in batches for state in (plain, recorded)]
    assert len(parts(recorded)) == 1  # without exchanges there is one graph
    for expected, found in zip(kept[::2], kept[1::2], strict=True):
        assert torch.equal(found.loss, expected.loss)
        assert torch.equal(found.embeddings, expected.embeddings)
        assert (found.recompute_difference is None) == (recompute == "never")
    assert len({found.loss.item() for found in kept}) == 6
    assert torch.equal(batches[2].views[1].image, images(12, seed=2).views[1].image)  # also the one that was recorded
    torch.testing.assert_close(recorded.network.state_dict(), plain.network.state_dict(), rtol=0, atol=0)


def one_recorded_rank(recompute: str, folder: str) -> None:
    """Results, weights and exchanges of six steps, plain and recorded."""
    world = described_world("cpu")
    exchanged, exchanges, outcomes = dist.all_reduce, [], []

    def all_reduce(tensor: Tensor, *, op: dist.ReduceOp.RedOpType, **settings: Any) -> Any:
        exchanges.append((op, tensor.numel()))
        return exchanged(tensor, op=op, **settings)

    with (
        narrow_resnet18(), on_cpu(), joined(world, 60.0),
        patch("peclr_dali.train.steps.exact.free_bytes", lambda *_: 0),  # "auto" keeps one graph
        patch.object(micro_batches, "buckets", partial(buckets, bucket_bytes=2**14)),
        patch.object(dist, "all_reduce", all_reduce),
    ):  # fmt: skip
        both = states(f"train.recompute={recompute}", world=world)
        for seed in range(6):
            for state in both:
                exchanges.clear()
                result = state.take_step(part(images(12, seed=seed), state.exact.share))
                tensors = [result.loss, result.embeddings, *state.network.state_dict().values()]
                outcomes.append((tensors, result.recompute_difference, sorted(map(str, exchanges))))
                outcomes[-1] = copy.deepcopy(outcomes[-1])
        assert len({graph.place for graph, _ in parts(both[1])}) == 1
    torch.save(outcomes, Path(folder) / f"{world.rank}.pt")


@pytest.mark.parametrize(("world_size", "recompute"), [(2, "never"), (2, "always"), (2, "auto"), (3, "auto")])
def test_a_replayed_step_of_several_ranks_is_the_step(world_size: int, recompute: str, tmp_path: Path) -> None:
    """Of two ranks, one has two micro-batches. Exchanges are made in each replay, between two graphs."""
    ranks.run_ranks(world_size, one_recorded_rank, recompute, str(tmp_path), log=tmp_path / "log")
    for rank in range(world_size):
        outcomes = torch.load(tmp_path / f"{rank}.pt", weights_only=False)
        for expected, found in zip(outcomes[::2], outcomes[1::2], strict=True):
            assert all(torch.equal(ours, theirs) for ours, theirs in zip(found[0], expected[0], strict=True))
            assert found[1:] == expected[1:]
            assert len(found[2]) > 5  # those of gradients are several
        assert len({float(found[0][0]) for found in outcomes}) == 6


def test_others_may_write_gradients_meanwhile() -> None:
    """As a benchmark does with another loss; and the recorded step runs no Python."""
    plain, recorded = states()
    for seed in range(5):
        expected, found = (one.step(images(12, seed=seed)) for one in (plain, recorded))
        assert torch.equal(found.loss, expected.loss)
        assert_same(gradients(recorded.network), gradients(plain.network), relative=0)
        recorded.network.zero_grad()
        if seed == 2:
            recorded.exact.embed = lambda *_: pytest.fail("the step was not replayed")


def test_a_recording_is_not_timed_and_a_replay_is() -> None:
    """An event in a CUDA graph cannot be read."""
    _, recorded = states()
    for _ in range(2):
        recorded.step(images(12))
    recorded.exact.own_work.take_s()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Recorded, "replay", lambda _: None)
        patch.setattr("peclr_dali.train.steps.stopwatch.time.perf_counter", iter([1.0, 3.0]).__next__)
        recorded.step(images(12))
    assert recorded.exact.own_work.take_s() == 2


@pytest.mark.parametrize(
    ("device", "world_size", "settings", "expected"),
    [
        ("cuda", 1, ["train.cuda_graph=true"], True),
        ("cuda", 1, [], False),
        ("cpu", 1, ["train.cuda_graph=true"], False),
        ("cuda", 2, ["train.cuda_graph=true"], True),
    ],
)
def test_what_is_recorded(device: str, world_size: int, settings: list[str], expected: bool) -> None:
    """GPUs only. A batch more is then held."""
    world = World(world_size=world_size, device=torch.device(device))
    config, plain = (load_config(Config, [], [*TINY, *more]) for more in (settings, []))
    assert is_recorded(config, world) == expected
    held, without = (_bytes_of_batches(one, world) for one in (config, plain))
    assert held == without * (1 + expected / 4)  # two are made ahead, one is in the making, one in use


def test_what_cannot_be_recorded_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch ends the recording with an error of its own."""
    _, recorded = states()
    for _ in range(2):
        recorded.step(images(12))

    @contextmanager
    def graph(*_: Any, **__: Any) -> Iterator[None]:
        try:
            yield
        finally:
            raise RuntimeError("capture was\ninvalidated")

    monkeypatch.setattr(torch.cuda, "graph", graph)
    with pytest.raises(UserError, match=r"recorded as a CUDA graph \(capture was invalidated\): set train.cuda_graph"):
        recorded.step(images(12))
    monkeypatch.setattr(recorded.exact, "embed", Mock(side_effect=torch.OutOfMemoryError("no\nmemory")))
    with pytest.raises(UserError, match=r"recorded as a CUDA graph \(no memory\): set train.cuda_graph"):
        recorded.step(images(12))
    assert not recorded.exact.own_work.is_off
    assert type(recorded.exact.world) is World
