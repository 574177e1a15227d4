"""Writes the pose network of a run as ONNX."""

import dataclasses
import json
import logging
import warnings
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn

from peclr_dali.errors import UserError
from peclr_dali.models.pose import PoseNetwork, view_intrinsics
from peclr_dali.pipelines.config import PipelinesConfig
from peclr_dali.pipelines.sources import load_index
from peclr_dali.skeleton import HAND
from peclr_dali.train.config.load import to_dict
from peclr_dali.train.distributed.world import single_process
from peclr_dali.train.export.weights import card_beside, model_card
from peclr_dali.train.pose.inference import canonical_loader
from peclr_dali.train.pose.labels import PoseLabels
from peclr_dali.train.pose.pose_run import PoseRun, load_pose_run
from peclr_dali.writing import write_bytes, write_text

OPSET: Final = 18  # onnxruntime 1.14 and later support it
INPUTS: Final = ("image", "intrinsics")
OUTPUTS: Final = ("keypoints_px", "joints")
PARITY: Final = 1e-4
"""Largest difference from torch, as a share of the largest coordinate, or of the view's side or a bone if longer."""


def random_views(count: int, side_px: int, *, seed: int) -> tuple[Tensor, Tensor]:
    """Random pictures (count, 3, S, S), and camera matrices (count, 3, 3) as of views: rotated and off centre."""
    generator = torch.Generator().manual_seed(seed)
    image = torch.randint(0, 256, (count, 3, side_px, side_px), generator=generator, dtype=torch.uint8)
    intrinsics = side_px * (3 * torch.eye(3) + torch.rand(count, 3, 3, generator=generator))
    intrinsics[:, 2] = torch.tensor([0.0, 0.0, 1.0])
    return image, intrinsics


def views_to_compare(run: PoseRun, count: int) -> tuple[Tensor, Tensor]:
    """Canonical views of the run's own pictures, and their camera matrices; without its data those of random pictures.

    Shapes as of `random_views`.
    """
    config, world = dataclasses.replace(run.config, pipelines=PipelinesConfig()), single_process("cpu")
    try:
        index = load_index(config.data)
    except UserError:
        return random_views(count, config.geometry.side_px, seed=3)
    with canonical_loader(index, np.arange(min(count, len(index))), count, config, world) as loader:
        batch = next(iter(loader))
    cameras = torch.from_numpy(PoseLabels.of(index).intrinsics[batch.samples[:, 0].numpy()])
    return batch.views[0].image, view_intrinsics(cameras, batch.views[0].source_to_view_px)


class PoseOnnx(nn.Module):
    """A pose network with the two outputs of its ONNX file."""

    def __init__(self, network: PoseNetwork) -> None:
        super().__init__()
        self.network = network

    def forward(self, image: Tensor, intrinsics: Tensor) -> tuple[Tensor, Tensor]:
        """Views (N, 3, S, S) uint8 and their intrinsics (N, 3, 3) -> keypoints (N, K, 2) px, joints (N, K, 3)."""
        output = self.network(image, intrinsics)
        return output.keypoints_px, output.joints


def export_onnx(source: Path, out: Path) -> str:
    """Write the pose network of a fine-tuning run as ONNX, and compare it with torch in onnxruntime; returns a line.

    Inputs are `image` (N, 3, S, S) uint8 RGB, the view, and `intrinsics` (N, 3, 3) float32 of that view
    (`view_intrinsics` in models/pose.py); outputs `keypoints_px` (N, K, 2) in the view's pixels, corner-based, and
    `joints` (N, K, 3) in the camera's frame, in reference bones. N is free, S is the run's. The file's metadata say
    under "preprocessing" how a picture becomes `image`; docs/export.md has an example.

    Raises:
        UserError: `source` is no fine-tuning run, or the file's results differ from torch's; it is not written.
    """
    import onnxruntime
    import onnxscript  # noqa: F401  # torch's exporter needs it; now, before the work

    run = load_pose_run(source)
    side_px = run.config.geometry.side_px
    network = PoseOnnx(run.network).eval()
    batch = torch.export.Dim("batch", min=1)
    logging.getLogger("torch.onnx._internal.exporter._schemas").setLevel(logging.ERROR)  # about torch's own code
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.onnx.export(
            network, random_views(2, side_px, seed=0), dynamo=True, dynamic_shapes=({0: batch}, {0: batch}),
            input_names=INPUTS, output_names=OUTPUTS, opset_version=OPSET, external_data=False, verbose=False,
        )  # fmt: skip
    assert program is not None
    about = {
        "image": "uint8 RGB, NCHW: the square about the box's centre, its side the box's longer one times box_margin",
        "frame": "corner-based: the centre of the first pixel is (0.5, 0.5); OpenCV counts it as (0, 0)",
        "side_px": side_px,
        "box_margin": run.box_margin,
        "halved_before_the_warp": run.config.geometry.antialias,
        "outside_of_the_picture": run.config.geometry.fill,
        "keypoints": HAND.keypoints,
        "keypoint_0_of_keypoints_px": "palm" if run.config.pose.first_keypoint == "palm" else "wrist",
        "joints": "in the camera's frame, in lengths of the middle finger's first phalanx",
        "depths_were_learnt": run.depth,
    }
    program.model.metadata_props["preprocessing"] = json.dumps(about)
    model = program.model_proto.SerializeToString()
    views = views_to_compare(run, 3)  # another batch size than the traced one
    session: Any = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    outputs = session.run(list(OUTPUTS), {name: view.numpy() for name, view in zip(INPUTS, views, strict=True)})
    with torch.inference_mode():
        expected = [output.numpy() for output in network(*views)]
    off_px, off = (float(np.abs(ours - torchs).max()) for ours, torchs in zip(outputs, expected, strict=True))
    largest_px, largest = (float(np.abs(torchs).max()) for torchs in expected)
    if not off_px <= PARITY * max(side_px, largest_px) or (run.depth and not off <= PARITY * max(1.0, largest)):
        raise UserError(
            f"{out} was not written: in onnxruntime the network's keypoints are up to {off_px:.2g} px from torch's, of "
            f"{largest_px:.4g}, its joints {off:.2g} reference bones, of {largest:.4g}. Try another checkpoint or "
            "version of onnxruntime, or write the network for torch, with --pose"
        )
    write_bytes(out, model)
    write_text(card_beside(out), json.dumps(model_card(to_dict(run.config), run.step, run.path), indent=2))
    return (
        f"{run.config.encoder.name} with its pose head, views of {side_px} px, any batch, opset {OPSET}; at most "
        f"{off_px:.1g} px from torch in onnxruntime"
    )
