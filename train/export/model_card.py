"""Writes exported weights with their model card: what they expect, and how they were trained."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save

from peclr_dali.models.network import IMAGENET_MEAN, IMAGENET_STD
from peclr_dali.parsing import parse_json
from peclr_dali.train.runs.folder import RunFolder
from peclr_dali.writing import whole_file, write_bytes, write_text


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
