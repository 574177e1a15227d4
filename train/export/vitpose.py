"""Gives a ViT of timm the names and positions of ViTPose's, as HaMeR and WiLoR load it."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional as F

from peclr_dali.errors import UserError
from peclr_dali.models.weights import State

VITPOSE_PICTURE_PX: Final = (256, 192)
"""Height and width of the pictures that ViTPose's ViT sees, in HaMeR and WiLoR too."""


def vitpose_from_timm(vit: Any, state: Mapping[str, Tensor]) -> State:
    """Give a ViT of timm the names and positions of ViTPose's, as HaMeR and WiLoR load it (their backbones/vit.py).

    `vit` is the network, and `state` its tensors.

    Positions, of a square of patches (1, [1 +] S * S, C), are resampled for 256 x 192 pixels as timm does it: (1, 193,
    C). ViTPose's ViT has no class token, and adds position 0 to all others: it is zero. Its patches begin 2 pixels
    further left and further up.

    Raises:
        UserError: the network has other layers than that ViT, patches of another size, no learnt positions, or another
            activation than its exact GELU.
    """
    named = {re.sub(r"^norm\.", "last_norm.", key): tensor for key, tensor in state.items() if key != "cls_token"}
    blocks = {key.split(".")[1] for key in named if key.startswith("blocks.")}
    parts = ("norm1", "attn.qkv", "attn.proj", "norm2", "mlp.fc1", "mlp.fc2")
    layers = ["patch_embed.proj", "last_norm", *(f"blocks.{block}.{part}" for block in blocks for part in parts)]
    differing = named.keys() ^ {"pos_embed", *(f"{layer}.{kind}" for layer in layers for kind in ("weight", "bias"))}
    difference = min(differing, default="")
    if not difference and named["patch_embed.proj.weight"].shape[-1] != 16:
        difference = "its patches"
    if not difference and not all(_is_exact_gelu(block.mlp.act) for block in vit.blocks):
        difference = "its activation"
    if difference:
        raise UserError(
            f"--keys vitpose: ViTPose's ViT differs in {difference}; expected a plain ViT of timm with patches of 16 "
            "pixels, absolute positions and exact GELU, such as timm/vit_small_patch16_224"
        )
    positions = named["pos_embed"].float()
    side = math.isqrt(positions.shape[1])
    square = positions[:, -side * side :].mT.reshape(1, -1, side, side)
    resampled = F.interpolate(square, [px // 16 for px in VITPOSE_PICTURE_PX], mode="bicubic", antialias=True)
    return {**named, "pos_embed": F.pad(resampled.flatten(2).mT, (0, 0, 1, 0))}


def _is_exact_gelu(activation: Callable[[Tensor], Tensor]) -> bool:
    """Whether an activation is GELU itself; its approximation by tanh is up to 5e-4 apart."""
    values = torch.linspace(-6, 6, 1001)
    return torch.allclose(activation(values.clone()), F.gelu(values), rtol=0, atol=1e-6)


def vitpose_call(vit: Any) -> str:
    """The call that builds the network of a file: ViTPose's own small ViT has more heads than timm's."""
    heads, ratio = vit.blocks[0].attn.num_heads, vit.blocks[0].mlp.fc1.out_features / vit.embed_dim
    sizes = f"embed_dim={vit.embed_dim}, depth={len(vit.blocks)}, num_heads={heads}, mlp_ratio={ratio:g}"
    return f"for ViTPose's ViT(img_size=(256, 192), patch_size=16, {sizes}, qkv_bias=True)"
