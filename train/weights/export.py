"""Exports trained networks: the encoder for torchvision or timm, the pose network as ONNX or as one small file."""

from __future__ import annotations

import errno
import json
import logging
import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from safetensors.torch import save
from torch import Tensor, nn

from peclr_dali.errors import UserError
from peclr_dali.models.encoders import make_encoder
from peclr_dali.models.network import IMAGENET_MEAN, IMAGENET_STD
from peclr_dali.models.pose import PoseNetwork
from peclr_dali.models.weights import encoder_state
from peclr_dali.train.pose.pose_run import PoseRun, load_pose_run, random_views
from peclr_dali.train.runs.checkpoint import FORMAT, METADATA_KEY, find_checkpoint, load_checkpoint, sha256_of
from peclr_dali.writing import NotWritten, refuse_inputs, whole_file, write_bytes

OPSET: Final = 18
"""Version of the ONNX operators; onnxruntime 1.14 and later support it."""
INPUTS: Final = ("image", "intrinsics")
OUTPUTS: Final = ("keypoints_px", "joints")
PARITY_PX: Final = 1e-3
"""Largest difference of keypoints from torch's."""
PARITY: Final = 1e-4
"""Largest difference of joints from torch's, as a share of the largest coordinate."""


def export_encoder(source: Path, out: Path, *, half: bool = False) -> str:
    """Write the encoder of a checkpoint or of a run's folder (see `find_checkpoint`) as .safetensors or .pth.

    With `half`, all but batch norm's statistics is rounded to float16, unless a tensor's numbers would overflow.

    Returns:
        A line about the written file and its checkpoint.

    Raises:
        UserError: there is no checkpoint, or `out` is the checkpoint, has another ending or cannot be written.
    """
    require_ending(out, ".safetensors", ".pth")
    path = find_checkpoint(source, "the folder of a run, with checkpoints/ in it, or a checkpoint")
    refuse_inputs(out, [path])
    saved = load_checkpoint(path)
    name, side_px = saved["config"]["encoder"]["name"], saved["config"]["geometry"]["side_px"]
    state = encoder_state(saved["network"])
    for key, tensor in state.items():
        if tensor.is_floating_point():
            rounds = half and not key.endswith(("running_mean", "running_var"))
            state[key] = _halved(tensor.contiguous().float()) if rounds else tensor.contiguous().float()
    save_tensors(state, out, {"encoder": name})
    with torch.device("meta"):
        return f"{name} of {path}, {make_encoder(name, side_px).note_on_file(out)}"


def export_network(source: Path, out: Path) -> str:
    """Write the pose network of a fine-tuning run, with its configuration, as .safetensors in half precision.

    `evaluate`, `predict`, `finetune --from` and `export` take the file as a run. Weights are rounded to float16, unless
    a tensor's would overflow; statistics of batch norm stay as they are. Of several sources of data the file names the
    first, so that `--set data.root=...` chooses others.

    Returns:
        A line about the written file and its checkpoint.

    Raises:
        UserError: `source` is not a fine-tuning run, or `out` is the checkpoint, has another ending or cannot be
            written.
    """
    require_ending(out, ".safetensors")
    run = load_pose_run(source)
    refuse_inputs(out, [run.path])
    saved = load_checkpoint(run.path)
    learnt = dict(run.network.named_parameters())
    state = {key: _halved(value) if key in learnt else value for key, value in run.network.state_dict().items()}
    config, data = saved["config"], saved["config"]["data"]
    if isinstance(data, list):
        config = {**config, "data": data[0]}
    about = {"format": FORMAT, "step": run.step, "config": config, "depth": run.depth,
             "sha256": sha256_of(state)}  # fmt: skip
    save_tensors(state, out, {METADATA_KEY: json.dumps(about)})
    return f"{run.config.encoder.name} with its pose head of {run.path}, {out.stat().st_size / 1e6:.1f} MB"


def _halved(tensor: Tensor) -> Tensor:
    half = tensor.half()
    return half if bool(half.isfinite().all()) else tensor


def require_ending(out: Path, *endings: str) -> None:
    """Refuse a file to write whose name has another ending."""
    if out.suffix not in endings:
        raise UserError(f"{out} ends in {out.suffix or 'nothing'}; expected {' or '.join(endings)}")


def save_tensors(content: Mapping[str, Any], out: Path, note: Mapping[str, str]) -> None:
    """Write tensors by name: with a note if `out` ends in .safetensors, else by torch.save without it."""
    if out.suffix == ".safetensors":
        tensors = {key: value.contiguous() for key, value in content.items()}
        write_bytes(out, save(tensors, metadata={"format": "pt", **note}))
    else:
        with whole_file(out) as file:
            torch.save(content, file)


class PoseOnnx(nn.Module):
    """An exported pose network, with its two outputs as a tuple."""

    def __init__(self, network: PoseNetwork) -> None:
        super().__init__()
        self.network = network

    def forward(self, image: Tensor, intrinsics: Tensor) -> tuple[Tensor, Tensor]:
        """Views (N, 3, S, S) uint8 and their intrinsics (N, 3, 3) -> keypoints (N, K, 2) px, joints (N, K, 3)."""
        output = self.network(image, intrinsics)
        return output.keypoints_px, output.joints


def export_onnx(source: Path, out: Path) -> str:
    """Write the pose network of a fine-tuning run as ONNX, and compare it with torch in onnxruntime.

    Inputs are `image` (N, 3, S, S) uint8 RGB, the view, and `intrinsics` (N, 3, 3) float32 of that view
    (`view_intrinsics` in models/pose.py); outputs `keypoints_px` (N, K, 2) in the view's pixels, corner-based, and
    `joints` (N, K, 3) in the camera's frame, in reference bones. N is free, S is the run's. The file's metadata say
    under "preprocessing" how a picture becomes `image`; docs/onnx.md has an example.

    Returns:
        A line about the written file and its difference from torch.

    Raises:
        UserError: `source` is not a fine-tuning run, `out` does not end in .onnx or cannot be written, a package is
            missing, or the file's results differ from torch's.
    """
    require_ending(out, ".onnx")
    if not out.parent.is_dir():  # the export below takes long
        raise NotWritten(errno.ENOENT, os.strerror(errno.ENOENT), str(out))
    try:
        import onnx  # noqa: F401
        import onnxruntime  # noqa: F401
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise UserError(
            f"--onnx needs the packages onnx, onnxscript and onnxruntime ({error}): install the extra by "
            "pip install 'peclr-dali[onnx]', or run make setup in the checkout"
        ) from error
    run = load_pose_run(source)
    side_px = run.config.geometry.side_px
    network = PoseOnnx(run.network).eval()
    batch = torch.export.Dim("batch", min=1)
    logging.getLogger("torch.onnx._internal.exporter._schemas").setLevel(logging.ERROR)  # about torch's own code
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.onnx.export(
            network,
            random_views(2, side_px, seed=0),
            dynamo=True,
            dynamic_shapes=({0: batch}, {0: batch}),
            input_names=INPUTS,
            output_names=OUTPUTS,
            opset_version=OPSET,
            external_data=False,
            verbose=False,
        )
    assert program is not None
    program.model.metadata_props["preprocessing"] = json.dumps(preprocessing(run))
    model = program.model_proto.SerializeToString()
    views = random_views(3, side_px, seed=3)  # another batch size than the traced one
    worst_px, worst = _difference(network, model, views)
    if not (worst_px <= PARITY_PX and worst <= PARITY):
        raise UserError(
            f"{out} was not written: in onnxruntime the network's keypoints are up to {worst_px:.2g} px from torch's, "
            f"its joints up to {worst:.2g} of their size; expected at most {PARITY_PX:g} and {PARITY:g}. Report it "
            "with the versions of torch and onnxruntime"
        )
    write_bytes(out, model)
    return (
        f"{run.config.encoder.name} with its pose head, views of {side_px} px, any batch, opset {OPSET}; at most "
        f"{worst_px:.1g} px from torch in onnxruntime"
    )


def preprocessing(run: PoseRun) -> dict[str, Any]:
    """Description of the preprocessing, stored in the ONNX file."""
    geometry, skeleton = run.config.geometry, run.network.skeleton
    return {
        "image": "uint8 RGB, 0 to 255, layout NCHW, side_px x side_px; the network itself normalises by mean and std",
        "mean": IMAGENET_MEAN,
        "std": IMAGENET_STD,
        "side_px": geometry.side_px,
        "box_margin": run.box_margin,
        "view": f"the square about the centre of the {skeleton.name}'s box, its side the longer one of the box times "
        "box_margin, resized to side_px by one affine map A (2 x 3) of pixel coordinates; not stretched, not rotated",
        "frame": "corner-based: the centre of the first pixel is (0.5, 0.5); OpenCV counts it as (0, 0)",
        "resize": "halve the picture (mean of 2 x 2 pixels) until A magnifies by 0.7 or more, then warp bilinearly"
        if geometry.antialias
        else "warp bilinearly",
        "outside_of_the_picture": geometry.fill,
        "intrinsics": "float32, A with the last row (0, 0, 1), times the camera matrix K of the picture",
        "keypoints_px": "pixels of the view, in the same frame; the inverse of A gives those of the picture",
        "joints": f"in the camera's frame, in lengths of {skeleton.reference_bone_words}",
        "depths": "learnt" if run.depth else "not learnt: the joints mean nothing",
        "skeleton": skeleton.name,
        "keypoints": skeleton.keypoints,
        "keypoint_0_of_keypoints_px": "palm" if run.config.pose.first_keypoint == "palm" else skeleton.keypoints[0],
    }


def _difference(network: nn.Module, model: bytes, views: tuple[Tensor, Tensor]) -> tuple[float, float]:
    """Largest differences between onnxruntime and torch: of keypoints in pixels, of joints as a share of their size."""
    import onnxruntime

    session: Any = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    found = session.run(list(OUTPUTS), {name: view.numpy() for name, view in zip(INPUTS, views, strict=True)})
    with torch.inference_mode():
        keypoints_px, joints = (output.numpy() for output in network(*views))
    of_joints = np.abs(found[1] - joints).max() / np.maximum(np.abs(joints).max(), 1.0)
    return float(np.abs(found[0] - keypoints_px).max()), float(of_joints)
