"""Which precision "auto" takes on a CPU."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from peclr_dali.pipelines.views.augmentation import GeometryConfig
from peclr_dali.train.config.pretraining import Config, TrainConfig
from peclr_dali.train.pose.inference import inference
from peclr_dali.train.steps.training_state import resolve_precision

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("avx512_bf16", "amx", "side_px", "expected"),
    [
        (True, False, 32, "bf16"),
        (False, True, 128, "bf16"),
        (False, False, 128, "fp32"),
        (True, True, 31, "fp32"),
    ],
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


def test_trained_networks_run_without_tf32() -> None:
    """Torch computes float32's convolutions in TF32 on GPUs; the setting is that of the process afterwards."""
    cudnn: Any = torch.backends.cudnn
    before = cudnn.allow_tf32, cudnn.conv.fp32_precision
    with inference(CPU):
        assert not cudnn.allow_tf32
        assert cudnn.conv.fp32_precision == torch.backends.cuda.matmul.fp32_precision == "ieee"
    assert (cudnn.allow_tf32, cudnn.conv.fp32_precision) == before == (True, "tf32")
