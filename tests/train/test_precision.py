"""Which precision "auto" takes on a CPU, and how often weights are cast to it."""

import dataclasses
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

from peclr_dali.pipelines.views.augmentation import GeometryConfig
from peclr_dali.train.config.load import load_config
from peclr_dali.train.config.pretraining import Config, TrainConfig
from peclr_dali.train.pose.inference import inference
from peclr_dali.train.steps.train_state import resolve_precision
from tests.train.tiny_run import TINY
from tests.train.tiny_step import Operators, Pretraining, gradients, images

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("avx512_bf16", "amx", "side_px", "expected"),
    [(True, False, 32, "bf16"), (False, True, 128, "bf16"), (False, False, 128, "fp32"), (True, True, 31, "fp32")],
)
def test_auto_is_bf16_where_a_cpu_is_fast_and_right(
    monkeypatch: pytest.MonkeyPatch, avx512_bf16: bool, amx: bool, side_px: int, expected: str
) -> None:
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: avx512_bf16)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)
    config = Config(geometry=GeometryConfig(side_px=side_px))
    assert resolve_precision(config, CPU) == expected
    chosen = dataclasses.replace(config, train=TrainConfig(precision="fp16"))
    assert resolve_precision(chosen, CPU) == "fp16"


@pytest.mark.usefixtures("narrow")
@pytest.mark.parametrize("recompute", ["never", "always"])
def test_weights_are_cast_once_in_a_step(recompute: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And not in each of three micro-batches. The gradients are as if they had been, in every bit."""
    overrides = (*TINY, "train.precision=bf16", f"train.recompute={recompute}")
    batch = images(12)
    for view in batch.views:
        view.image = view.image.repeat_interleave(4, 2).repeat_interleave(4, 3)  # 32 pixels, see `resolve_precision`
    once, each_time = (Pretraining(load_config(Config, [], overrides)) for _ in range(2))
    kernels = [module.weight for module in once.network.modules() if isinstance(module, nn.Conv2d)]
    with Operators() as ran:
        once.step(batch)
    monkeypatch.setattr("peclr_dali.train.steps.exact.casts_once", lambda device: nullcontext())
    each_time.step(batch)
    of_weights, of_gradients = len(kernels) + 3, 3  # two linear layers and a bias too; those of the projections
    assert ran.counts["_to_copy", torch.float32] == of_weights + of_gradients
    for ours, theirs in zip(gradients(once.network), gradients(each_time.network), strict=True):
        assert torch.equal(ours, theirs)


def test_trained_networks_run_without_tf32() -> None:
    """Torch computes float32's convolutions in TF32 on GPUs; the setting is that of the process afterwards."""
    cudnn: Any = torch.backends.cudnn
    before = cudnn.allow_tf32, cudnn.conv.fp32_precision
    with inference(CPU):
        assert not cudnn.allow_tf32
        assert cudnn.conv.fp32_precision == torch.backends.cuda.matmul.fp32_precision == "ieee"
    assert (cudnn.allow_tf32, cudnn.conv.fp32_precision) == before == (True, "tf32")
