"""Writes the encoder of a run, or its whole pose network, as a file of weights, with a model card beside it."""

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save
from torch import Tensor
from torch.nn import functional as F

from peclr_dali.errors import UserError
from peclr_dali.models.encoders import make_encoder
from peclr_dali.models.network import IMAGENET_MEAN, IMAGENET_STD
from peclr_dali.models.weights import State
from peclr_dali.parsing import parse_json
from peclr_dali.train.config.load import to_dict
from peclr_dali.train.pose.pose_run import load_pose_run
from peclr_dali.train.runs.checkpoint import FORMAT, METADATA_KEY, find_checkpoint, load_checkpoint
from peclr_dali.train.runs.folder import RunFolder
from peclr_dali.writing import whole_file, write_bytes, write_text

VITPOSE_PICTURE_PX = (256, 192)
"""Height and width of the pictures that ViTPose's ViT sees, in HaMeR and WiLoR too."""


def export_encoder(source: Path, out: Path, *, keys: Literal["vitpose"] | None = None) -> str:
    """Write the encoder of a checkpoint or of a run's folder (see `find_checkpoint`) as .safetensors or .pth.

    Tensors have the names of torchvision or timm, in float32, or of ViTPose's ViT; in a .pth these are under
    "state_dict", as HaMeR reads them. Returns a line about the written file and its checkpoint.

    Raises:
        UserError: there is no checkpoint, or the encoder is no ViT such as ViTPose's.
    """
    path = find_checkpoint(source, "the folder of a run, with checkpoints/ in it, or a checkpoint")
    saved = load_checkpoint(path)
    name, side_px = saved["config"]["encoder"]["name"], saved["config"]["geometry"]["side_px"]
    encoder = make_encoder(name, side_px)
    encoder.load_weights(saved["network"], str(path), name)
    state = encoder.library_state_dict()
    card, note = model_card(saved["config"], saved["step"], path), encoder.note_on_file(out)
    if keys == "vitpose":
        vit = getattr(encoder, encoder.inner)
        state = vitpose_from_timm(vit, state)
        # ViTPose's own small ViT has more heads than timm's.
        heads, ratio = vit.blocks[0].attn.num_heads, vit.blocks[0].mlp.fc1.out_features / vit.embed_dim
        sizes = f"embed_dim={vit.embed_dim}, depth={len(vit.blocks)}, num_heads={heads}, mlp_ratio={ratio:g}"
        note = f"for ViTPose's ViT(img_size=(256, 192), patch_size=16, {sizes}, qkv_bias=True)"
        card["height_width_px"] = VITPOSE_PICTURE_PX
    state = {key: tensor.float() if tensor.is_floating_point() else tensor for key, tensor in state.items()}
    is_wrapped = keys == "vitpose" and out.suffix == ".pth"
    save_tensors({"state_dict": state} if is_wrapped else state, out, card | {"tensors": note})
    return f"{name} of {path}, {note}"


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
    if not difference:
        values = torch.linspace(-6, 6, 1001)  # GELU's approximation by tanh is up to 5e-4 apart
        activations = torch.stack([block.mlp.act(values.clone()) for block in vit.blocks])
        if not torch.allclose(activations, F.gelu(values), rtol=0, atol=1e-6):
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


def export_network(source: Path, out: Path) -> str:
    """Write the pose network of a fine-tuning run as .safetensors in half precision.

    `evaluate`, `predict`, `finetune --from` and `export` take the file as a run. Weights are rounded to float16, unless
    a tensor's would overflow; statistics of batch norm stay as they are. The file's metadata have the tables of the
    configuration that the network needs. Returns and raises as `export_encoder`.
    """
    run = load_pose_run(source)
    learnt = dict(run.network.named_parameters())
    state = {key: _halved(value) if key in learnt else value for key, value in run.network.state_dict().items()}
    config = to_dict(run.config)
    about = {
        "format": FORMAT,
        "step": run.step,
        "config": {name: config[name] for name in ("encoder", "pose", "geometry", "data")},
        "depth": run.depth,
    }
    save_tensors(state, out, model_card(config, run.step, run.path), {METADATA_KEY: json.dumps(about)})
    return f"{run.config.encoder.name} with its pose head of {run.path}, {out.stat().st_size / 1e6:.1f} MB"


def _halved(tensor: Tensor) -> Tensor:
    half = tensor.half()
    return half if bool(half.isfinite().all()) else tensor


def model_card(config: Mapping[str, Any], steps: int, checkpoint: Path) -> dict[str, Any]:
    """What an exported file says about its input and its training; the configuration has the data and augmentations."""
    versions, side_px = RunFolder(checkpoint.parent.parent, keep=1).versions_file, config["geometry"]["side_px"]
    return {
        "encoder": config["encoder"]["name"],
        "height_width_px": (side_px, side_px),
        "normalisation": {"pixels": "RGB, 0 to 1", "mean": IMAGENET_MEAN, "deviation": IMAGENET_STD},
        "steps": steps,
        "commit": parse_json(versions.read_bytes())["commit"] if versions.is_file() else "not stated",
        "licence": {"code": "MIT", "data": "not stated", "starting weights": "not stated"},
        "configuration": config,
    }


def card_beside(out: Path) -> Path:
    """The JSON file with the model card of an exported file."""
    return out.with_name(f"{out.name}.json")


def save_tensors(
    content: Mapping[str, Any], out: Path, card: Mapping[str, Any], note: Mapping[str, str] | None = None
) -> None:
    """Write tensors by name and their card: with card and note in a .safetensors, else by torch.save without them."""
    if out.suffix == ".safetensors":
        tensors = {key: value.contiguous() for key, value in content.items()}
        write_bytes(out, save(tensors, metadata={"format": "pt", "card": json.dumps(card), **(note or {})}))
    else:
        with whole_file(out) as file:
            torch.save(content, file)
    write_text(card_beside(out), json.dumps(card, indent=2))
