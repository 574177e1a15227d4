"""Writes the encoder of a run as a file of weights."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from peclr_dali.models.encoders import make_encoder
from peclr_dali.train.export.model_card import model_card, save_tensors
from peclr_dali.train.export.vitpose import VITPOSE_PICTURE_PX, vitpose_call, vitpose_from_timm
from peclr_dali.train.runs.checkpoint import find_checkpoint, load_checkpoint


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
        state, note = vitpose_from_timm(state), vitpose_call(encoder.network)
        card["height_width_px"] = VITPOSE_PICTURE_PX
    state = {key: tensor.float() if tensor.is_floating_point() else tensor for key, tensor in state.items()}
    is_wrapped = keys == "vitpose" and out.suffix == ".pth"
    save_tensors({"state_dict": state} if is_wrapped else state, out, card | {"tensors": note})
    return f"{name} of {path}, {note}"
