import copy
import logging
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.nn import functional as F

import train.graph_memory
from errors import UserError
from models.equivariance import EquivarianceConfig, build_undo
from models.losses import nt_xent
from pipelines.batch import Batch, View
from tests.train import ranks
from train.batch_statistics import synchronise
from train.contrastive_step import ContrastiveStep, StepResult
from train.distributed import World, described_world, joined, micro_batch_share

Recompute = Literal["auto", "always", "never"]
SIDE_PX = 8
UNDO = build_undo(EquivarianceConfig(), output_side_px=SIDE_PX)


def network(dtype: torch.dtype = torch.float64) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, stride=2, bias=False),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Conv2d(4, 6, 2, bias=False),
        nn.BatchNorm2d(6, momentum=0.3),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(6, 8),
    ).to(dtype)  # without biases before batch norm, whose gradient is zero and cannot be compared to a relative bound


def norms(model: nn.Module) -> list[nn.BatchNorm2d]:
    return [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]


def images(samples: int) -> Batch:
    generator = torch.Generator().manual_seed(samples)

    def view() -> View:
        angle_rad, scale = torch.rand(2, samples, generator=generator) + 0.5
        cos, sin = scale * angle_rad.cos(), scale * angle_rad.sin()
        shift = torch.rand(samples, 2, 1, generator=generator) * 0.2 - 0.1
        matrix = torch.cat([torch.stack([cos, -sin, sin, cos], dim=1).view(-1, 2, 2), shift], dim=2)
        pixels = torch.randint(0, 256, (samples, 3, SIDE_PX, SIDE_PX), generator=generator, dtype=torch.uint8)
        return View(pixels, matrix, matrix)

    return Batch((view(), view()), torch.arange(samples), torch.arange(samples))


def part(batch: Batch, rows: range) -> Batch:
    cut = slice(rows.start, rows.stop)
    views = tuple(View(v.image[cut], v.matrix[cut], v.source_to_view_px[cut]) for v in batch.views)
    return Batch(views, batch.samples[cut], batch.positions[cut])


def to_double(image: Tensor) -> Tensor:
    return image.double() / 255


def to_float(image: Tensor) -> Tensor:
    return image.float() / 255


def run(
    model: nn.Module,
    samples: int,
    micro_batch: int,
    recompute: Recompute = "never",
    world: World | None = None,
    preprocess: Callable[[Tensor], Tensor] = to_double,
    **settings: Any,
) -> StepResult:
    step = ContrastiveStep(
        model,
        UNDO,
        batch=samples,
        micro_batch=micro_batch,
        recompute=recompute,
        world=world,
        preprocess=preprocess,
        **settings,
    )
    return step(part(images(samples), step.share))


def gradients(model: nn.Module) -> list[Tensor]:
    return [p.grad for p in model.parameters() if p.grad is not None]


def buffers(model: nn.Module) -> list[Tensor]:
    return list(model.buffers())


def assert_same(ours: list[Tensor], theirs: list[Tensor], relative: float = 1e-10) -> None:
    """Each tensor's difference is small against its largest number."""
    assert len(ours) == len(theirs) > 0
    for a, b in zip(ours, theirs, strict=True):
        assert a.shape == b.shape
        assert float((a - b).abs().max()) <= relative * float(b.abs().max())


def plain_gradients(model: nn.Module, samples: int, micro_batch: int) -> tuple[Tensor, list[Tensor]]:
    """Autograd through everything at once; batch norm sees micro-batches."""
    batch = images(samples)
    views: list[list[Tensor]] = [[], []]
    for start in range(0, samples, micro_batch):
        small = part(batch, range(start, start + micro_batch))
        image = torch.cat([to_double(view.image) for view in small.views])
        matrix = torch.cat([view.matrix for view in small.views])
        for k, embedding in enumerate(UNDO(model(image), matrix, matrix).chunk(2)):
            views[k].append(embedding)
    loss = nt_xent(torch.cat(views[0]), torch.cat(views[1]))
    return loss.detach(), list(torch.autograd.grad(loss, list(model.parameters())))


@pytest.mark.parametrize("micro_batch", [2, 4, 12])
@pytest.mark.parametrize("recompute", ["never", "always", "auto"])
def test_gradient_is_that_of_the_whole_loss_in_train_mode(recompute: Recompute, micro_batch: int) -> None:
    loss, expected = plain_gradients(network(), 12, micro_batch)
    model = network()
    result = run(model, 12, micro_batch, recompute)
    assert_same(gradients(model), expected)
    torch.testing.assert_close(result.loss, loss, atol=1e-12, rtol=0)


@pytest.mark.parametrize("micro_batch", [1, 2, 3, 6, 12])
@pytest.mark.parametrize("recompute", ["never", "always"])
def test_frozen_batch_norm_makes_chunking_invisible(recompute: Recompute, micro_batch: int) -> None:
    trained = network()
    run(trained, 12, 4)  # statistics unlike the initial ones
    trained.eval()
    loss, expected = plain_gradients(trained, 12, 12)
    before = [buffer.clone() for buffer in trained.buffers()]
    result = run(trained, 12, micro_batch, recompute)
    assert_same(gradients(trained), expected)
    torch.testing.assert_close(result.loss, loss, atol=1e-12, rtol=0)
    assert all(torch.equal(a, b) for a, b in zip(trained.buffers(), before, strict=True))


def test_recomputing_gives_the_same_bits() -> None:
    kept, recomputed = network(), network()
    first, second = run(kept, 12, 2, "never"), run(recomputed, 12, 2, "always")
    assert first.recompute_difference is None
    assert second.recompute_difference is not None
    assert second.recompute_difference.item() == 0
    assert torch.equal(first.loss, second.loss)
    assert torch.equal(first.embeddings, second.embeddings)
    for ours, theirs in ((gradients(kept), gradients(recomputed)), (buffers(kept), buffers(recomputed))):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_a_network_that_is_not_a_function_of_its_input_shows() -> None:
    torch.manual_seed(0)
    noisy = nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(3 * SIDE_PX**2, 4).double())
    difference = run(noisy, 4, 2, "always").recompute_difference
    assert difference is not None
    assert difference.item() > 1e-3


def test_embeddings_are_the_inverted_projections_in_order() -> None:
    model = network().eval()
    batch = images(6)
    result = run(model, 6, 2)
    with torch.no_grad():
        for k, view in enumerate(batch.views):
            expected = UNDO(model(to_double(view.image)), view.matrix, view.source_to_view_px)
            torch.testing.assert_close(result.embeddings[k], expected, atol=1e-13, rtol=0)
    assert not result.embeddings.requires_grad
    assert not result.loss.requires_grad


@pytest.mark.parametrize("recompute", ["never", "always"])
def test_running_statistics_take_one_step_towards_the_mean_over_micro_batches(recompute: Recompute) -> None:
    model = network()
    means, variances = [], []
    batch = images(6)
    convolutions = [module for module in model if isinstance(module, nn.Conv2d)]
    for start in range(0, 6, 2):
        x = torch.cat([to_double(view.image[start : start + 2]) for view in batch.views])
        for convolution, norm in zip(convolutions, norms(model), strict=True):
            x = convolution(x)
            channels = x.detach().transpose(0, 1).flatten(1)
            means.append(channels.mean(1))
            variances.append(channels.var(1, unbiased=True))
            x = F.relu(F.batch_norm(x, None, None, norm.weight, norm.bias, training=True))
    for norm in norms(model):
        nn.init.constant_(norm.get_buffer("running_mean"), 0.5)
    run(model, 6, 2, recompute)
    for k, (norm, momentum) in enumerate(zip(norms(model), (0.1, 0.3), strict=True)):
        mean, variance = torch.stack(means[k::2]).mean(0), torch.stack(variances[k::2]).mean(0)
        torch.testing.assert_close(norm.running_mean, (1 - momentum) * 0.5 + momentum * mean, atol=1e-12, rtol=0)
        torch.testing.assert_close(norm.running_var, (1 - momentum) * 1.0 + momentum * variance, atol=1e-12, rtol=0)
        assert norm.num_batches_tracked == 1
        assert norm.momentum == momentum


def test_an_exception_leaves_the_buffers_as_they_were() -> None:
    class Fragile(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = network()
            self.left = 2

        def forward(self, image: Tensor) -> Tensor:
            if self.left == 0:
                raise RuntimeError("broken")
            self.left -= 1
            result: Tensor = self.inner(image)
            return result

    model = Fragile()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(RuntimeError, match="broken"):
        run(model, 6, 2)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert [norm.momentum for norm in norms(model)] == [0.1, 0.3]


def test_second_step_does_not_see_the_gradients_of_the_first() -> None:
    model = network().eval()
    run(model, 6, 2)
    once = [gradient.clone() for gradient in gradients(model)]
    run(model, 6, 2)
    assert_same(gradients(model), once)


def test_scaler_scales_gradients_and_not_the_loss() -> None:
    plain, scaled = network(), network()
    scaler = GradScaler("cpu", init_scale=1024.0)
    first = run(plain, 6, 2)
    second = run(scaled, 6, 2, scaler=scaler)
    assert torch.equal(first.loss, second.loss)
    assert_same(gradients(scaled), [1024 * gradient for gradient in gradients(plain)])


def test_recomputing_holds_one_graph_at_a_time() -> None:
    class Saved:
        def __init__(self, tensor: Tensor) -> None:
            self.tensor = tensor

    alive: weakref.WeakSet[Saved] = weakref.WeakSet()

    def pack(tensor: Tensor) -> Saved:
        saved = Saved(tensor.detach())
        alive.add(saved)
        return saved

    class Watched(nn.Linear):
        def forward(self, image: Tensor) -> Tensor:
            held_before.append(len(alive) > 0)
            return super().forward(image.flatten(1))

    expected: dict[Recompute, list[bool]] = {"never": [False, True, True], "always": [False] * 6}
    for recompute, held in expected.items():
        held_before: list[bool] = []
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved.tensor):
            run(Watched(3 * SIDE_PX**2, 4).double(), 6, 2, recompute)
        assert held_before == held
        assert not alive


def test_temperature_reaches_the_loss() -> None:
    result = run(network(), 6, 2, temperature=0.1)
    torch.testing.assert_close(result.loss, nt_xent(result.embeddings[0], result.embeddings[1], 0.1))


def test_bfloat16_autocast() -> None:
    """Both modes run the same kernels: equal bits on the CPU. Against float32, what 8 bits leave after three layers."""
    kept, recomputed, exact = network(torch.float32), network(torch.float32), network(torch.float32)
    settings: dict[str, Any] = {"autocast_dtype": torch.bfloat16, "preprocess": to_float}
    first = run(kept, 12, 4, "never", **settings)
    second = run(recomputed, 12, 4, "always", **settings)
    reference = run(exact, 12, 4, preprocess=to_float)
    assert second.recompute_difference is not None
    assert second.recompute_difference.item() == 0
    assert_same(gradients(recomputed), gradients(kept), relative=0)
    assert first.loss.dtype == first.embeddings.dtype == torch.float32
    assert not torch.equal(first.loss, reference.loss)  # it did run in bfloat16
    torch.testing.assert_close(first.loss, reference.loss, atol=2e-2, rtol=0)
    for ours, theirs in zip(gradients(kept), gradients(exact), strict=True):
        assert F.cosine_similarity(ours.flatten(), theirs.flatten(), dim=0) > 0.97


def test_auto_keeps_graphs_that_fit(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    for free, expected in ((2**40, "never"), (0, "always")):
        monkeypatch.setattr("train.contrastive_step.free_bytes", lambda world, free=free: free)
        step = ContrastiveStep(network(), UNDO, batch=6, micro_batch=2, preprocess=to_double)
        assert step.recompute == "auto"
        with caplog.at_level(logging.INFO, "train.contrastive_step"):
            step(images(6))
        assert step.recompute == expected
        assert f"recompute = {expected!r}: " in caplog.text
        assert "of 3 micro-batches" in caplog.text
        caplog.clear()
        step(images(6))
        assert not caplog.text  # decided once
    assert ContrastiveStep(network(), UNDO, batch=6, micro_batch=6).recompute == "never"


def test_graph_memory_counts_each_saved_block_once_and_no_parameters() -> None:
    weight = nn.Linear(16, 16, bias=False)
    x = torch.randn(1000, 16)

    def forward() -> Tensor:
        hidden: Tensor = weight(x)  # saves x and the weight
        return torch.tanh(hidden) * hidden.sin()  # saves tanh's result (twice), hidden, sin's result

    _, count = train.graph_memory.with_graph_bytes(weight, forward, torch.device("cpu"))
    assert count == 4 * 1000 * 16 * 4
    assert train.graph_memory.free_bytes(World()) > 2**20
    halved = train.graph_memory.free_bytes(World(local_world_size=2))
    assert halved == pytest.approx(train.graph_memory.free_bytes(World()) / 2, rel=0.2)


def test_measured_graph_goes_when_its_result_goes() -> None:
    tokens: weakref.WeakSet[nn.Module] = weakref.WeakSet()

    class Node(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.token = nn.Module()
            tokens.add(ctx.token)
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return gradient

    def forward() -> Tensor:
        x: Tensor = Node.apply(torch.ones(3, 2, requires_grad=True))  # type: ignore[no-untyped-call]
        return x * x.amax(1, keepdim=True).detach()  # as the range in the latent inverse: saved, but on no way back

    result, _ = train.graph_memory.with_graph_bytes(nn.Identity(), forward, torch.device("cpu"))
    assert len(tokens) == 1
    del result
    assert not tokens


def test_wrong_batch_size_is_named() -> None:
    step = ContrastiveStep(network(), UNDO, batch=8, micro_batch=2, preprocess=to_double)
    with pytest.raises(ValueError, match="batch of 6 samples, but this rank's share is 8"):
        step(images(6))


def test_cumulative_batch_norm_is_refused() -> None:
    model = network()
    norms(model)[0].momentum = None
    with pytest.raises(ValueError, match="momentum None"):
        run(model, 4, 2)


SAMPLES, MICRO_BATCH = 8, 2  # four micro-batches: one each on four ranks, 2 + 1 + 1 on three


def one_rank(recompute: Recompute, folder: str) -> None:
    """Runs in a process of its own, as torchrun would start it."""
    world = described_world("cpu")
    with joined(world, 60.0):
        model = network()
        result = run(model, SAMPLES, MICRO_BATCH, recompute, world)
    outcome = (world, result.loss, result.embeddings, result.recompute_difference, gradients(model), buffers(model))
    torch.save(outcome, Path(folder) / f"{world.rank}.pt")


@pytest.mark.parametrize(
    ("world_size", "recompute"), [(1, "never"), (1, "always"), (2, "auto"), (2, "always"), (3, "auto"), (4, "auto")]
)
def test_any_number_of_ranks_trains_the_same_function(world_size: int, recompute: Recompute, tmp_path: Path) -> None:
    """Against autograd through everything at once, batch norm in train mode."""
    log = tmp_path / "log"
    ranks.finish(ranks.start_ranks(world_size, one_rank, recompute, str(tmp_path), log=log), log)

    model = network()
    loss, expected = plain_gradients(model, SAMPLES, MICRO_BATCH)
    model = network()
    alone = run(model, SAMPLES, MICRO_BATCH)
    shares = [len(micro_batch_share(SAMPLES, MICRO_BATCH, rank, world_size)) for rank in range(world_size)]
    assert len(set(shares)) == (2 if world_size == 3 else 1)
    for rank in range(world_size):
        outcome = torch.load(tmp_path / f"{rank}.pt", weights_only=False)
        world, their_loss, embeddings, difference, their_gradients, their_buffers = outcome
        assert world == World(rank, world_size, rank, torch.device("cpu"), world_size)
        assert difference == 0 if recompute == "always" else difference is None
        torch.testing.assert_close(their_loss, loss, atol=1e-12, rtol=0)
        torch.testing.assert_close(embeddings, alone.embeddings, atol=1e-12, rtol=0)
        assert_same(their_gradients, expected)
        assert_same(their_buffers, buffers(model))


@pytest.mark.slow  # the compiler
@pytest.mark.filterwarnings("ignore:.*is deprecated:DeprecationWarning:torch")  # the compiler's own imports
@pytest.mark.parametrize("recompute", ["never", "always", "auto"])
def test_compiled_network_is_compiled_once(recompute: Recompute) -> None:
    torch.compiler.reset()
    eager, compiled = network(), network()
    reference = run(eager, 6, 2)
    from torch._dynamo.utils import counters  # slow to import, and the ranks import this file

    counters.clear()
    network_to_run = torch.compile(compiled)
    assert isinstance(network_to_run, nn.Module)
    step = ContrastiveStep(network_to_run, UNDO, batch=6, micro_batch=2, preprocess=to_double, recompute=recompute)
    result = step(images(6))
    torch.testing.assert_close(result.loss, reference.loss, atol=1e-12, rtol=0)
    assert_same(gradients(compiled), gradients(eager))
    assert_same(buffers(compiled), buffers(eager))
    step(images(6))
    assert counters["stats"]["unique_graphs"] == 1


def test_synchronised_batch_norm_says_what_it_needs() -> None:
    with pytest.raises(UserError, match="needs GPUs"):
        synchronise(network(), World(), batch=8, micro_batch=2)
    with pytest.raises(UserError, match=r"4 micro-batches of train.batch = 8 cannot be dealt evenly to 3 ranks"):
        synchronise(network(), World(0, 3, device=torch.device("cuda")), batch=8, micro_batch=2)


def one_synchronised_rank(folder: str) -> None:
    """Two ranks on one GPU, which NCCL refuses and Gloo does not."""
    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
    gpu = torch.device("cuda", 0)
    world = World(rank, 2, 0, gpu, 2)
    model = network().to(gpu)
    synchronise(model, world, batch=8, micro_batch=2)
    step = ContrastiveStep(model, UNDO, batch=8, micro_batch=2, preprocess=to_double, recompute="always", world=world)
    result = step(part(images(8), step.share).to(gpu))
    outcome = (result.loss.cpu(), [g.cpu() for g in gradients(model)], [b.cpu() for b in buffers(model)])
    torch.save(outcome, Path(folder) / f"{rank}.pt")
    torch.distributed.destroy_process_group()


@pytest.mark.gpu
def test_synchronised_batch_norm_is_that_of_the_micro_batches_of_all_ranks(tmp_path: Path) -> None:
    """Ranks hold samples 0 to 3 and 4 to 7, so batch norm sees 0, 1, 4, 5 together and 2, 3, 6, 7."""
    log = tmp_path / "log"
    ranks.finish(ranks.start_ranks(2, one_synchronised_rank, str(tmp_path), log=log), log)
    everything, order = images(8), torch.tensor([0, 1, 4, 5, 2, 3, 6, 7])
    views = tuple(View(v.image[order], v.matrix[order], v.source_to_view_px[order]) for v in everything.views)
    model = network()
    step = ContrastiveStep(model, UNDO, batch=8, micro_batch=4, preprocess=to_double)
    alone = step(Batch(views, everything.samples[order], everything.positions[order]))
    for rank in range(2):
        loss, their_gradients, their_buffers = torch.load(tmp_path / f"{rank}.pt", weights_only=False)
        torch.testing.assert_close(loss, alone.loss, atol=1e-10, rtol=0)
        assert_same(their_gradients, gradients(model), relative=1e-8)
        assert_same(their_buffers[:2], buffers(model)[:2], relative=1e-8)
