"""Writes the pose network of a run in half precision, as a file that is taken as a run."""

from __future__ import annotations

import json
from pathlib import Path

from torch import Tensor

from peclr_dali.train.config.load import to_dict
from peclr_dali.train.export.model_card import model_card, save_tensors
from peclr_dali.train.pose.pose_run import load_pose_run
from peclr_dali.train.runs.checkpoint import FORMAT, METADATA_KEY


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
    needed = {name: config[name] for name in ("encoder", "pose", "geometry", "data")}
    about = {"format": FORMAT, "step": run.step, "config": needed, "depth": run.depth}
    save_tensors(state, out, model_card(config, run.step, run.path), {METADATA_KEY: json.dumps(about)})
    return f"{run.config.encoder.name} with its pose head of {run.path}, {out.stat().st_size / 1e6:.1f} MB"


def _halved(tensor: Tensor) -> Tensor:
    half = tensor.half()
    return half if bool(half.isfinite().all()) else tensor
