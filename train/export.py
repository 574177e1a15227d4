"""The pre-trained encoder as a file that other projects load."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from errors import UserError
from train.runs.checkpoint import Checkpoints, load_checkpoint

_PREFIX = "encoder.resnet."


def export_encoder(source: Path, out: Path) -> str:
    """Write the encoder of a run's folder (its newest checkpoint) or of one checkpoint.

    Args:
        source: a run's folder or a checkpoint.
        out: ends in .safetensors or .pth.

    Returns:
        The encoder's name, such as "resnet50".

    Raises:
        UserError: there is no checkpoint, or `out` has another ending or cannot be written.
    """
    if out.suffix not in (".safetensors", ".pth"):
        raise UserError(f"{out} ends in {out.suffix or 'nothing'}; expected .safetensors or .pth")
    path = Checkpoints(source / "checkpoints", keep=1).latest() if source.is_dir() else source
    if path is None:
        raise UserError(f"{source} holds no checkpoint; expected the folder of a run, or a checkpoint")
    saved = load_checkpoint(path)
    state: dict[str, Tensor] = {
        name.removeprefix(_PREFIX): tensor.contiguous().float() if tensor.is_floating_point() else tensor
        for name, tensor in saved["network"].items()
        if name.startswith(_PREFIX)
    }
    try:
        if out.suffix == ".safetensors":
            save_file(state, out, metadata={"format": "pt", "encoder": saved["config"]["encoder"]["name"]})
        else:
            torch.save(state, out)
    except (OSError, RuntimeError, SafetensorError) as error:
        raise UserError(f"{out} cannot be written: {error}") from error
    return str(saved["config"]["encoder"]["name"])
