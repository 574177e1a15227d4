"""The number formats of a network in training."""

from typing import TypeVar

import torch
from torch import nn

from peclr_dali.train.config.finetuning import FinetuneConfig
from peclr_dali.train.config.pretraining import Config
from peclr_dali.train.distributed.world import World

PRECISIONS: dict[str, tuple[torch.dtype, torch.dtype | None]] = {
    "fp64": (torch.float64, None),
    "fp32": (torch.float32, None),
    "bf16": (torch.float32, torch.bfloat16),
    "fp16": (torch.float32, torch.float16),
}
"""Precision -> type of the parameters, and type of autocast (None: no autocast)."""

N = TypeVar("N", bound=nn.Module)


def resolve_precision(config: Config | FinetuneConfig, device: torch.device) -> str:
    """The precision that is used on a device."""
    if config.train.precision != "auto":
        return config.train.precision
    if device.type == "cuda":
        return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp16"
    # Without these instructions bf16 is emulated, and slower than fp32. Torch has no public name for them.
    fast = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    # Of smaller views, a ResNet's last strided convolution sees one pixel. There oneDNN of torch 2.10 reads memory that
    # was never written, and the gradient may be NaN.
    return "bf16" if fast and config.geometry.side_px >= 32 else "fp32"


def autocast_dtype(config: Config | FinetuneConfig, world: World) -> torch.dtype | None:
    """The type of autocast on this rank's device; None: no autocast."""
    return PRECISIONS[resolve_precision(config, world.device)][1]


def on_device(network: N, config: Config | FinetuneConfig, world: World) -> N:
    """The network on this rank's device, in the configured precision and memory layout."""
    dtype, _ = PRECISIONS[resolve_precision(config, world.device)]
    layout = torch.channels_last if config.train.channels_last else torch.contiguous_format
    for parameter in network.to(world.device, dtype).parameters():
        if parameter.ndim == 4:  # some models of timm have kernels of rank 5, which have no such layout
            parameter.data = parameter.data.contiguous(memory_format=layout)
    return network


def casts_once(device: torch.device) -> torch.autocast:
    """In the `with` block, autocast casts each weight once, for all micro-batches; do not change weights in it.

    Autocast itself stays on or off. It forgets its casts where its outermost block ends, and this is one. In a compiled
    network it has no effect: there the casts are part of the graph, and run in each micro-batch.
    """
    kind = device.type
    return torch.autocast(kind, dtype=torch.get_autocast_dtype(kind), enabled=torch.is_autocast_enabled(kind))
