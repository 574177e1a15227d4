"""The training step on a GPU: what precision, layout and compilation may change, and that nothing waits."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.nn import functional as F

from peclr_dali import Batch, View, World
from peclr_dali.models.network import Normalize
from peclr_dali.train.config.load import load_config
from peclr_dali.train.config.pretraining import Config
from peclr_dali.train.pretrain import pretrain
from peclr_dali.train.runs.meter import Meter
from peclr_dali.train.steps.exact import StepResult
from peclr_dali.train.steps.memory import HEADROOM_BYTES, free_bytes
from peclr_dali.train.steps.step_graph import StepGraph
from peclr_dali.train.trainer import before_the_loader
from tests.train import ranks
from tests.train.tiny_run import STEPS, config_of, rows_of, write_images
from tests.train.tiny_step import Pretraining, gradients, images, part

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:Synchronization debug mode")]

GPU = torch.device("cuda", 0)
SIDE_PX = 64
SETTINGS = (
    f"geometry.side_px={SIDE_PX}", "encoder.name=resnet18", "encoder.weights=random", "train.batch=24",
    "train.micro_batch=8", "train.epochs=2", "optim.warmup_epochs=1", "optim.lr=1e-3",
    "train.precision=fp32",
)  # fmt: skip


@pytest.fixture(autouse=True)
def full_float32() -> Iterator[None]:
    """float32 without TensorFloat32, as a reference; compiled code of other settings is forgotten."""
    before = torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32 = before
    torch.compiler.reset()


def state(*overrides: str, world: World | None = None) -> Pretraining:
    """The same weights each time, ten steps per epoch."""
    return Pretraining(load_config(Config, [], [*SETTINGS, *overrides]), world or World(device=GPU))


def batch(samples: int = 24, seed: int = 0) -> Batch:
    """Soft colours and any similarity, on the GPU."""
    made = images(samples, seed=seed)
    for view in made.views:
        soft = F.interpolate(view.image.float(), size=SIDE_PX, mode="bilinear")
        view.image = soft.to(torch.uint8).contiguous(memory_format=torch.channels_last)
    return made.to(GPU)


def assert_close(ours: StepResult, theirs: StepResult, *, loss: float, embeddings: float) -> None:
    """Losses within an absolute, embeddings within a relative bound on their largest number."""
    assert math.isfinite(float(ours.loss))
    assert abs(float(ours.loss) - float(theirs.loss)) <= loss
    assert float((ours.embeddings - theirs.embeddings).abs().max()) <= embeddings * float(theirs.embeddings.abs().max())


@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores")  # inductor's advice, against this test's intent
@pytest.mark.parametrize(
    ("override", "loss", "embeddings"),
    [
        ("train.precision=bf16", 0.02, 0.2),
        ("train.precision=fp16", 0.005, 0.03),
        ("train.channels_last=false", 1e-4, 1e-3),
        ("train.compile=true", 1e-3, 1e-2),
    ],
)
def test_what_makes_it_fast_changes_the_loss_little(override: str, loss: float, embeddings: float) -> None:
    """Bounds are about five times what a CPU shows for the same settings: 16 bits leave 8 or 11 of mantissa."""
    expected = state().exact(batch())
    made = state(override)
    result = made.exact(batch())
    assert_close(result, expected, loss=loss, embeddings=embeddings)
    assert result.embeddings.dtype == torch.float32
    assert {parameter.dtype for parameter in made.network.parameters()} == {torch.float32}
    assert len(gradients(made.network)) == len(list(made.network.parameters()))
    assert bool(flat_gradient(made).isfinite().all())


@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores")
@pytest.mark.parametrize(
    ("override", "recompute"),
    [("train.precision=fp32", "never"), ("train.precision=fp32", "always"), ("train.precision=fp16", "auto"),
     ("train.precision=bf16", "never"), ("train.compile=true", "never")],
)  # fmt: skip
def test_a_recorded_step_does_the_same(override: str, recompute: str) -> None:
    bound = 1e-3 if override.endswith("fp32") else 3e-2
    check_recorded(bound, World(device=GPU), override, f"train.recompute={recompute}")


def check_recorded(bound: float, world: World, *settings: str) -> None:
    """On other batches, weights, statistics and scales of fp16 than the recorded ones."""
    plain, recorded = (
        state(*settings, "optim.warmup_epochs=0", f"train.cuda_graph={how}", world=world) for how in ("false", "true")
    )
    for step in range(6):
        seen = part(batch(seed=step), plain.exact.share)
        ours, theirs = recorded.step(seen), plain.step(seen)
        assert_close(ours, theirs, loss=bound, embeddings=bound)
        difference = flat_gradient(recorded) - flat_gradient(plain)
        assert float(difference.norm()) <= bound * float(flat_gradient(plain).norm()), step
        torch.testing.assert_close([*recorded.network.buffers()], [*plain.network.buffers()], rtol=bound, atol=bound)
        plain.take_step(seen)
        recorded.network.load_state_dict(plain.network.state_dict())
        recorded.state.scaler.load_state_dict(plain.state.scaler.state_dict())
    assert isinstance(recorded.step, StepGraph)
    assert recorded.step._recording is not None
    assert (len(recorded.step._recording.recorder.parts) > 1) == (world.world_size > 1)


def one_recorded_rank(recompute: str) -> None:
    """Two ranks on one GPU, which NCCL refuses and Gloo does not."""
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    torch.distributed.init_process_group("gloo")
    check_recorded(1e-3, World(torch.distributed.get_rank(), 2, 0, GPU, 2), f"train.recompute={recompute}")
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("recompute", ["never", "always"])
def test_a_recorded_step_of_two_ranks_does_the_same(recompute: str, tmp_path: Path) -> None:
    """One has two micro-batches, the other one."""
    ranks.run_ranks(2, one_recorded_rank, recompute, log=tmp_path / "log")


def test_a_recorded_step_leaves_its_results_and_waits_for_nothing() -> None:
    made = state("train.cuda_graph=true")
    for step in range(3):
        made.take_step(batch(seed=step))
    seen, other = batch(seed=3), batch(seed=4)
    torch.cuda.synchronize()
    try:
        torch.cuda.set_sync_debug_mode("error")
        result = made.take_step(seen)
        for parameter in made.network.parameters():
            parameter.grad = None
        kept = result.embeddings.clone()
        later = made.take_step(other)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(parameter.grad is not None for parameter in made.network.parameters())
    assert torch.equal(result.embeddings, kept)
    assert not torch.equal(later.embeddings, kept)
    assert made.exact.own_work.take_s() > 0


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("recompute", ["never", "always"])
def test_a_step_does_not_wait_for_the_gpu(precision: str, recompute: str) -> None:
    """After the first step, which measures memory and sets kernels up. fp16 has to wait: whether the scaled gradients
    overflowed decides on the CPU if the optimiser steps."""
    made = state(f"train.precision={precision}", f"train.recompute={recompute}")
    seen = batch()
    made.take_step(seen)
    torch.cuda.synchronize()
    try:
        torch.cuda.set_sync_debug_mode("error")
        result = made.take_step(seen)
        with pytest.raises(RuntimeError, match="synchroniz"):  # the guard works
            result.loss.item()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert math.isfinite(float(result.loss))


def test_the_step_goes_before_the_loader() -> None:
    outside = torch.cuda.current_stream(GPU)
    with before_the_loader(GPU):
        assert torch.cuda.current_stream(GPU).priority < torch.cuda.Stream(GPU).priority  # type: ignore[no-untyped-call]
        result = state().exact(batch())
    assert torch.cuda.current_stream(GPU) == outside
    assert_close(result, state().exact(batch()), loss=1e-5, embeddings=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_gets_the_pixels_of_the_cpu(dtype: torch.dtype) -> None:
    pixels, normalize = batch().views[0].image, Normalize()
    expected = normalize(pixels.cpu()).to(dtype)
    with torch.autocast("cuda", dtype):
        rounded = normalize.to(GPU)(pixels)
    assert rounded.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(rounded.cpu(), expected)


def test_pinned_batches_are_copied_without_waiting() -> None:
    seen = batch()
    views = tuple(
        View(v.image.cpu().pin_memory(), v.matrix.cpu().pin_memory(), v.matrix.cpu().pin_memory()) for v in seen.views
    )
    torch.cuda.synchronize()
    try:
        torch.cuda.set_sync_debug_mode("error")
        copied = Batch(views, seen.samples, seen.positions).to(GPU)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(copied.views[1].image, seen.views[1].image)


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")  # nothing was stepped yet, which is the point
def test_a_step_that_overflows_is_skipped() -> None:
    made = state("train.precision=fp16")
    scaler = GradScaler("cuda", init_scale=2.0**127)
    made.state.scaler = made.exact.scaler = scaler
    before = [parameter.detach().clone() for parameter in made.network.parameters()]
    made.take_step(batch())
    assert all(torch.equal(old, new) for old, new in zip(before, made.network.parameters(), strict=True))
    assert not any(made.state.optimizer.state.values())
    assert scaler.get_scale() == 2.0**126
    scaler.update(1024.0)
    made.take_step(batch())
    assert not any(torch.equal(old, new) for old, new in zip(before, made.network.parameters(), strict=True))
    assert all(bool(parameter.isfinite().all()) for parameter in made.network.parameters())


@pytest.mark.parametrize(("precision", "bound"), [("fp32", 1e-5), ("bf16", 2e-2), ("fp16", 5e-3)])
def test_recomputing_gives_the_same_embeddings(precision: str, bound: float) -> None:
    """Within the bound: a kernel may sum in another order from call to call. Gradients follow, batch norm too."""
    kept, again = (state(f"train.precision={precision}", f"train.recompute={how}") for how in ("never", "always"))
    expected, result = kept.exact(batch()), again.exact(batch())
    assert expected.recompute_difference is None
    assert result.recompute_difference is not None
    assert float(result.recompute_difference) <= bound * float(expected.embeddings.abs().max())
    assert_close(result, expected, loss=bound, embeddings=bound)
    torch.testing.assert_close([*again.network.buffers()], [*kept.network.buffers()], rtol=bound, atol=bound)
    ours, theirs = flat_gradient(again), flat_gradient(kept)
    assert float((ours - theirs).norm()) <= 10 * bound * float(theirs.norm())


def flat_gradient(made: Pretraining) -> Tensor:
    return torch.cat([gradient.flatten() for gradient in gradients(made.network)])


@pytest.mark.parametrize("share", [1.0, 1e-9])
def test_memory_decides_on_recomputing(share: float) -> None:
    """Also the share of it that this process may use."""
    try:
        torch.cuda.set_per_process_memory_fraction(share, GPU)
        free = free_bytes(World(device=GPU), HEADROOM_BYTES)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, GPU)
    with patch("peclr_dali.train.steps.exact.free_bytes", lambda *_: free):
        made = state()
    made.exact(batch())
    assert made.exact.kept_graphs == (3 if share == 1 else 1)


ONE_ROW = (
    "train.device=cuda",
    "train.precision=fp32",
    "run.log_every=100",
    "run.checkpoint_every=100",
    "run.tensorboard=false",
)


@pytest.mark.usefixtures("narrow")
@pytest.mark.parametrize(("decoder", "views"), [("cpu", "cpu"), ("cpu", "gpu"), ("gpu", "gpu"), ("gpu", "dali")])
def test_nothing_waits_for_the_gpu_between_two_rows_of_metrics(
    decoder: str, views: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the second step to the last but one, in all threads. The loader's own wait, for an event, is allowed."""

    next_batch = Meter.next_batch

    def watched(meter: Meter[Any], batches: Iterator[Batch]) -> Batch:
        batch, step = next_batch(meter, batches), meter._run_steps + 1
        if step in (2, STEPS):
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("error" if step < STEPS else "default")
        return batch

    monkeypatch.setattr(Meter, "next_batch", watched)
    write_images(tmp_path / "images")
    try:
        where = (f"pipelines.decoder={decoder}", f"pipelines.views={views}")
        pretrain(config_of(tmp_path / "images", tmp_path / "run", *ONE_ROW, *where), "never")
    finally:
        torch.cuda.set_sync_debug_mode("default")
    (row,) = rows_of(tmp_path / "run")
    assert row["step"] == STEPS
