"""The exact step's loss and gradient are those of the whole batch, on any number of ranks."""

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.nn import functional as F

from peclr_dali import ExactStep, NTXent, UserError
from peclr_dali.pipelines.samples.shares import micro_batch_share
from peclr_dali.train.distributed.world import World, buckets, described_world, joined
from peclr_dali.train.steps import micro_batches
from tests.train import ranks
from tests.train.tiny_step import (
    SIDE_PX,
    UNDO,
    OfKeypoints,
    Operators,
    Recompute,
    assert_same,
    exact_step,
    gradients,
    images,
    network,
    part,
    plain_gradients,
    run,
    spread,
    to_double,
    to_float,
)


@pytest.mark.parametrize("loss_of", [NTXent(temperature=0.1), spread], ids=["nt_xent", "spread"])
@pytest.mark.parametrize("micro_batch", [2, 4, 12])
@pytest.mark.parametrize("recompute", ["never", "always", "auto"])
def test_gradient_equals_that_of_the_whole_loss_in_train_mode(
    recompute: Recompute, micro_batch: int, loss_of: Callable[..., Tensor]
) -> None:
    loss, expected = plain_gradients(network(), 12, micro_batch, loss_of)
    model = network()
    result = run(model, 12, micro_batch, recompute, loss=loss_of)
    assert_same(gradients(model), expected)
    torch.testing.assert_close(result.loss, loss, atol=1e-12, rtol=0)


@pytest.mark.parametrize("micro_batch", [1, 2, 3, 6, 12])
@pytest.mark.parametrize("recompute", ["never", "always"])
def test_frozen_batch_norm_makes_chunking_invisible(recompute: Recompute, micro_batch: int) -> None:
    trained = network()
    run(trained, 12, 4)  # statistics unlike the initial ones, and gradients, which the next step does not add to
    trained.eval()
    loss, expected = plain_gradients(trained, 12, 12)
    before = [buffer.clone() for buffer in trained.buffers()]
    result = run(trained, 12, micro_batch, recompute)
    assert_same(gradients(trained), expected)
    torch.testing.assert_close(result.loss, loss, atol=1e-12, rtol=0)
    assert all(torch.equal(a, b) for a, b in zip(trained.buffers(), before, strict=True))


@pytest.mark.parametrize("how", [{"recompute": "always"}, {"kept_graphs": 1}, {"kept_graphs": 4}])
def test_recomputing_gives_the_same_bits(how: dict[str, Any]) -> None:
    """All six micro-batches, or some of them."""
    kept, recomputed = network(), network()
    first, second = run(kept, 12, 2, "never"), run(recomputed, 12, 2, **how)
    assert first.recompute_difference is None
    assert second.recompute_difference == 0
    assert torch.equal(first.loss, second.loss)
    assert torch.equal(first.embeddings, second.embeddings)
    assert_same(gradients(recomputed), gradients(kept), relative=0)
    assert_same(list(recomputed.buffers()), list(kept.buffers()), relative=0)


@pytest.mark.parametrize("rate", [0.1, 0.5])
def test_a_network_that_is_not_a_function_of_its_input_gives_a_warning(
    rate: float, caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(0)
    noisy = nn.Sequential(nn.Flatten(), nn.Dropout(rate), nn.Linear(3 * SIDE_PX**2, 4).double())
    step = exact_step(noisy, batch=4, micro_batch=2, recompute="always")
    for _ in range(2):
        assert (step(images(4)).recompute_difference or 0) > 1e-3
    (warning,) = caplog.records
    assert "recomputed embeddings differ" in warning.getMessage()


@pytest.mark.parametrize(("size", "warns"), [(2**-8, False), (0.3, True)])
def test_rounding_to_16_bits_gives_no_warning(size: float, warns: bool, caplog: pytest.LogCaptureFixture) -> None:
    """Each call is off by up to a bfloat16's rounding of its values."""
    torch.manual_seed(0)
    model = network()
    model.register_forward_hook(lambda _, __, output: output * (1 + size * (2 * torch.rand_like(output) - 1)))
    run(model, 12, 4, "always")
    assert bool(caplog.records) is warns


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


def test_gradients_of_all_tensors_are_summed_together() -> None:
    """Autograd's own sum is a kernel for each tensor and micro-batch, which a fast GPU would wait for."""

    found = []
    for micro_batch in (6, 2):
        with Operators() as ran:
            run(network(), 12, micro_batch)
        found.append({name: ran.counts[name, torch.float64] for name in ("add_", "_foreach_add_")})
    assert found[1]["add_"] == found[0]["add_"]
    assert found[1]["_foreach_add_"] - found[0]["_foreach_add_"] >= 4


@pytest.mark.parametrize("rarely", [{0}, {1}, {0, 2}, {3}, set()])
def test_a_layer_that_only_some_micro_batches_use_has_their_gradient(rarely: set[int]) -> None:
    """Also if the first or the last one does not use it. Without any, there is no gradient."""

    class Sometimes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.always, self.rare = nn.Linear(3, 4), nn.Linear(3, 4)
            self.double()

        def forward(self, image: Tensor) -> Tensor:
            used: Tensor = self.always(image)
            return used + self.rare(image) if int(image[0, 0]) in rarely else used  # the micro-batch's number

    images = torch.rand(8, 2, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    images[..., 0] += torch.arange(4).repeat_interleave(2)[:, None]
    torch.manual_seed(0)
    model = Sometimes()

    def embed(batch: Tensor, rows: slice) -> Tensor:
        return torch.stack([model(view) for view in batch[rows].unbind(1)])

    whole = torch.cat([embed(images, slice(start, start + 2)) for start in range(0, 8, 2)], dim=1)
    expected = torch.autograd.grad(NTXent()(whole), list(model.parameters()), allow_unused=True)
    ExactStep(model, embed, NTXent(), batch=8, micro_batch=2, recompute="never")(images)
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        assert (parameter.grad is None) == (gradient is None)
        if gradient is not None:
            torch.testing.assert_close(parameter.grad, gradient, atol=1e-12, rtol=0)


def test_scaler_scales_gradients_and_not_the_loss() -> None:
    plain, scaled = network(), network()
    assert torch.equal(run(plain, 6, 2).loss, run(scaled, 6, 2, scaler=GradScaler("cpu", init_scale=1024.0)).loss)
    assert_same(gradients(scaled), [1024 * gradient for gradient in gradients(plain)])


def test_bfloat16_autocast() -> None:
    """Both modes run the same kernels: equal bits on the CPU. Against float32, what 8 bits leave after three layers."""
    kept, recomputed, exact = network(torch.float32), network(torch.float32), network(torch.float32)
    settings: dict[str, Any] = {"autocast_dtype": torch.bfloat16, "preprocess": to_float}
    first = run(kept, 12, 4, "never", **settings)
    second = run(recomputed, 12, 4, "always", **settings)
    reference = run(exact, 12, 4, preprocess=to_float)
    assert second.recompute_difference == 0
    assert_same(gradients(recomputed), gradients(kept), relative=0)
    assert first.loss.dtype == first.embeddings.dtype == torch.float32
    assert not torch.equal(first.loss, reference.loss)  # it did run in bfloat16
    torch.testing.assert_close(first.loss, reference.loss, atol=2e-2, rtol=0)
    for ours, theirs in zip(gradients(kept), gradients(exact), strict=True):
        assert F.cosine_similarity(ours.flatten(), theirs.flatten(), dim=0) > 0.97


@pytest.mark.parametrize("recompute", ["never", "always"])
def test_forward_and_backward_passes_are_the_ranks_own_work(recompute: Recompute) -> None:
    """So a rank whose backward passes alone are slow is reported as one that holds the others up."""
    model = network()
    step = exact_step(model, batch=4, micro_batch=2, recompute=recompute)
    step(images(4))
    step.own_work.take_s()

    def slowed(module: nn.Module, inputs: object, output: Tensor) -> None:
        if output.requires_grad:
            output.register_hook(lambda gradient: time.sleep(0.05))  # type: ignore[no-untyped-call]

    model.register_forward_hook(slowed)
    step(images(4))
    assert step.own_work.take_s() >= 2 * 0.05


def test_any_loss_of_any_module_on_any_number_of_views() -> None:
    """On plain tensors: three views of vectors, and a function as the loss."""

    def loss_of(embeddings: Tensor) -> Tensor:  # every sample with every other, over all views
        flat = embeddings.flatten(0, 1)
        return (flat @ flat.T).sin().mean()

    def embed(vectors: Tensor, rows: slice) -> Tensor:  # (n, V, 5)
        embeddings: Tensor = model(vectors[rows].flatten(0, 1))
        return embeddings.view(-1, 3, 2).transpose(0, 1)

    torch.manual_seed(0)
    model, vectors = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 2)).double(), torch.randn(8, 3, 5).double()
    loss = loss_of(embed(vectors, slice(None)))
    expected = list(torch.autograd.grad(loss, list(model.parameters())))
    result = ExactStep(model, embed, loss_of, batch=8, micro_batch=2, recompute="always")(vectors)
    assert_same(gradients(model), expected)
    torch.testing.assert_close(result.loss, loss.detach(), atol=1e-12, rtol=0)


def test_sizes_that_do_not_fit_are_named_as_the_arguments_are() -> None:
    with pytest.raises(UserError, match=r"^batch = 8 holds 1 micro-batches of 8 images.* a smaller micro_batch,"):
        exact_step(network(), batch=8, micro_batch=8, world=World(0, 2))
    with pytest.raises(ValueError, match=r"6 samples, but this rank's share is 8: give make_loader .*batch = 2"):
        exact_step(network(), batch=8, micro_batch=2)(images(6))
    with pytest.raises(UserError, match="micro_batch = 0: expected a whole number above 0"):
        exact_step(network(), batch=8, micro_batch=0)


NETWORK = nn.Linear(6, 6)


def embedded(batch: Tensor, rows: slice) -> Tensor:
    result: Tensor = NETWORK(batch[rows]).repeat(2, 1, 1)
    return result


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"batch": 1, "micro_batch": 1}, "batch = 1: one sample has no negatives; expected two or more"),
        ({"embed": lambda batch, rows: embedded(batch, slice(None))}, r"what embed gives has shape \(2, 4, 6\)"),
        ({"embed": lambda batch, rows: embedded(batch, rows).detach()}, "what embed gives has no graph"),
        ({"network": nn.Linear(6, 6)}, "embed has parameters that are not in `network`"),
        ({"embed": lambda batch, rows: nn.Linear(6, 6)(embedded(batch, rows))}, "embed has parameters that are not in"),
        ({"loss": lambda embeddings: nn.Linear(6, 1)(embeddings).sum()}, "loss has parameters, which get no gradient"),
        ({"loss": NTXent}, r"loss is the class NTXent: give a loss, such as NTXent\(\)"),
        ({"loss": lambda embeddings: embeddings.sum(2)}, r"what loss gives has shape \(2, 4\), expected \(\)"),
        ({"loss": lambda embeddings: embeddings.detach().sum()}, "what loss gives has no graph to the embeddings"),
    ],
)
def test_functions_that_do_not_fit_are_named(given: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {"network": NETWORK, "embed": embedded, "loss": NTXent(), "batch": 4, "micro_batch": 2}
    with pytest.raises((ValueError, TypeError), match=message):
        ExactStep(**arguments | given)(torch.ones(4, 6))


SAMPLES, MICRO_BATCH = 8, 2  # four micro-batches: one each on four ranks, 2 + 1 + 1 on three


def one_rank(recompute: Recompute, loss: Callable[..., Tensor], folder: str) -> None:
    """Runs in a process of its own, as torchrun would start it."""
    world = described_world("cpu")
    with joined(world, 60.0):
        model = network()
        result = run(model, SAMPLES, MICRO_BATCH, recompute, world, loss)
    of_step = (result.loss, result.embeddings, result.recompute_difference)
    outcome = (repr(world), *of_step, gradients(model), list(model.buffers()))
    torch.save(outcome, Path(folder) / f"{world.rank}.pt")


@pytest.mark.parametrize(
    ("world_size", "recompute", "loss_of"),
    [
        (2, "auto", NTXent()),
        (2, "always", NTXent()),
        (3, "auto", NTXent()),
        (4, "auto", NTXent()),
        (2, "always", spread),
        (3, "auto", spread),
        (1, "always", OfKeypoints()),
        (3, "auto", OfKeypoints()),
    ],
)
def test_any_number_of_ranks_trains_the_same_function(
    world_size: int, recompute: Recompute, loss_of: Callable[..., Tensor], tmp_path: Path
) -> None:
    """Against autograd through everything at once, batch norm in train mode."""
    ranks.run_ranks(world_size, one_rank, recompute, loss_of, str(tmp_path), log=tmp_path / "log")

    loss, expected = plain_gradients(network(), SAMPLES, MICRO_BATCH, loss_of)
    model = network()
    single = run(model, SAMPLES, MICRO_BATCH, loss=loss_of)
    shares = [len(micro_batch_share(SAMPLES, MICRO_BATCH, rank, world_size)) for rank in range(world_size)]
    assert len(set(shares)) == (2 if world_size == 3 else 1)
    for rank in range(world_size):
        outcome = torch.load(tmp_path / f"{rank}.pt", weights_only=False)
        described, their_loss, embeddings, difference, their_gradients, their_buffers = outcome
        assert described == repr(World(rank, world_size, rank, torch.device("cpu"), world_size))
        assert difference == 0 if recompute == "always" else difference is None
        torch.testing.assert_close(their_loss, loss, atol=1e-12, rtol=0)
        torch.testing.assert_close(embeddings, single.embeddings, atol=1e-12, rtol=0)
        assert_same(their_gradients, expected)
        assert_same(their_buffers, list(model.buffers()))


KEPT = (0, 1, 2, None)


def one_rank_keeping_graphs(folder: str) -> None:
    """With 0, 1 and 2 graphs kept on each rank, then as many as fit on the last one, which has little memory."""
    world = described_world("cpu")
    free = 0 if world.rank == world.world_size - 1 else 2**40
    outcomes = []
    with joined(world, 60.0), patch("peclr_dali.train.steps.exact.free_bytes", lambda *_: free):
        for kept_graphs in KEPT:
            model = network()
            step = exact_step(model, batch=8, micro_batch=2, recompute="auto", world=world, kept_graphs=kept_graphs)
            result = step(part(images(8), step.share))
            tensors = [result.loss, result.embeddings, *gradients(model), *model.buffers()]
            outcomes.append((step.kept_graphs, result.recompute_difference, tensors))
    torch.save(outcomes, Path(folder) / f"{world.rank}.pt")


@pytest.mark.parametrize("world_size", [2, 3])
def test_the_number_of_kept_graphs_changes_no_bit(world_size: int, tmp_path: Path) -> None:
    """Of three ranks, one has two micro-batches and recomputes, where the others have kept their only one."""
    ranks.run_ranks(world_size, one_rank_keeping_graphs, str(tmp_path), log=tmp_path / "log")
    for rank in range(world_size):
        outcomes = torch.load(tmp_path / f"{rank}.pt", weights_only=False)
        assert [kept for kept, _, _ in outcomes] == [0, 1, 2, 1]
        assert [difference for _, difference, _ in outcomes] == [0, 0, None, 0]
        for _, _, tensors in outcomes[1:]:
            assert all(torch.equal(ours, first) for ours, first in zip(tensors, outcomes[0][2], strict=True))


def test_sums_over_ranks_begin_during_the_backward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """In buckets of one parameter, the last first. The first layer's wait for one that the network does not use."""
    happened: list[object] = []

    def begin(world: World, gradients: list[Tensor]) -> Mock:
        happened.extend(name for name, p in model.named_parameters() if p.grad is gradients[0])
        return Mock(end=lambda: happened.append("end"))

    monkeypatch.setattr(World, "begin_sum_", begin)
    monkeypatch.setattr(micro_batches, "buckets", partial(buckets, bucket_bytes=1))
    model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1), nn.Linear(1, 1))
    model[0].register_parameter("unused", nn.Parameter(torch.ones(1)))
    model[1].register_full_backward_pre_hook(lambda *_: happened.append("second layer"))
    step = micro_batches.MicroBatchStep(model, batch=4, micro_batch=2, world=World(0, 2))
    step.backward(model(torch.ones(2, 1)).sum(), last=False)
    assert happened == ["second layer"]
    step.backward(model(torch.ones(2, 1)).sum(), last=True)
    step.sum_gradients()
    assert happened[1:] == ["2.bias", "2.weight", "second layer", "1.bias", "1.weight", "0.weight", *["end"] * 5]
