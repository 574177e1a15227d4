"""Weights in and out: those that a run starts from, those of PeCLR's authors, and exports for others and as ONNX."""

from __future__ import annotations

import dataclasses
import json
import logging
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

import numpy as np
import torch
from pydantic import TypeAdapter
from safetensors.torch import save
from torch import Tensor, nn

from peclr_dali.errors import UserError, in_one_line
from peclr_dali.models import weights
from peclr_dali.models.config import EncoderConfig, PoseConfig
from peclr_dali.models.encoders import build_encoder, make_encoder
from peclr_dali.models.network import IMAGENET_MEAN, IMAGENET_STD
from peclr_dali.models.pose import PoseNetwork
from peclr_dali.models.weights import load_strictly
from peclr_dali.parsing import or_shipped, parse_json
from peclr_dali.skeleton import HAND
from peclr_dali.train.config.load import to_dict
from peclr_dali.train.pose.pose_run import PoseRun, load_pose_run
from peclr_dali.train.runs.checkpoint import FORMAT, METADATA_KEY, find_checkpoint, load_checkpoint, write_checkpoint
from peclr_dali.train.runs.folder import RunFolder
from peclr_dali.writing import require_ending, whole_file, write_bytes, write_text


class Start(NamedTuple):
    """A network with its starting weights.

    Attributes:
        origin: what the weights were read from; "random" or "imagenet" if that is no file.
        keeps_head: whether the head's weights are those of a fine-tuned network; else they are random.
        depth: whether that head was trained with 3D labels.
    """

    network: PoseNetwork
    origin: str
    keeps_head: bool = False
    depth: bool = False


def start_pose_network(encoder: EncoderConfig, pose: PoseConfig, side_px: int | None = None) -> Start:
    """Build the network of a configuration with its starting weights; of the head see `PoseConfig.weights`.

    `encoder.weights` may also be a checkpoint, the name of a shipped network, or a run's folder: its best checkpoint on
    validation, or the newest if there was no validation. Weights that cannot be read or do not fit are a `UserError`.
    """
    path = or_shipped(Path(encoder.weights), ".safetensors")
    encoder = dataclasses.replace(encoder, weights=str(path))
    try:
        saved = load_checkpoint(
            find_checkpoint(path, "encoder.weights to be the folder of a run, or a file of weights")
        )
    except UserError:  # no checkpoint of this project
        if path.is_dir():
            raise
        return Start(PoseNetwork(build_encoder(encoder, side_px), pose), encoder.weights)
    name = saved["config"]["encoder"]["name"]
    if name != encoder.name:
        raise UserError(
            f"encoder.weights: {path} holds a {name}, and encoder.name = {encoder.name!r}: set encoder.name = {name!r}"
        )
    network = PoseNetwork(make_encoder(name, side_px), pose)
    network.encoder.load_weights(saved["network"], encoder.weights, name)
    its_head = {**saved["config"].get("pose", {}), "weights": "auto"}
    if its_head != dataclasses.asdict(pose):  # of pre-training, another head, or pose.weights = "random"
        return Start(network, encoder.weights)
    load_strictly(network, saved["network"], origin=encoder.weights, model="its configuration")
    return Start(network, encoder.weights, keeps_head=True, depth=saved.get("depth", True))


_EXPECTED = "a published pose network of PeCLR"


def convert(source: Path, out: Path) -> str:
    """Convert a pose network of the authors to a checkpoint that `evaluate`, `predict` and `export` take as a run.

    Their encoders need no conversion: `encoder.weights` reads them. Returns a line about the written file.

    Raises:
        UserError: `source` is of another kind or does not fit, or `out` does not end in .pth.
    """
    require_ending(out, ".pth")
    state = weights.with_named_children(weights.read_weights(source, key="SOURCE", expected=_EXPECTED))
    name = weights.resnet_name(state)
    if name is None or not any("zroot_ref." in key for key in state):
        found = f"a {name}, which encoder.weights reads as it is" if name else next(iter(state), "nothing")
        raise UserError(f"{source} holds {found}: expected {_EXPECTED}")
    state = weights.encoder_state(state, ["backend_model.conv1.weight"], str(source))  # all of it, without a prefix
    pose = PoseConfig(first_keypoint="palm")
    network = PoseNetwork(make_encoder(name), pose)
    model = f"the authors' pose network on a {name}"
    try:
        weights.load_strictly(network, weights.pose_from_published(state), origin=str(source), model=model)
    except (LookupError, RuntimeError) as error:
        raise UserError(f"{source} does not fit {model}: {in_one_line(error)}. Download it again") from error
    config = {
        "encoder": {"name": name, "weights": "random"},
        "pose": TypeAdapter(PoseConfig).dump_python(pose, mode="json"),
        "geometry": {"side_px": weights.PUBLISHED_SIDE_PX},
        "data": {"box": "joints", "box_margin": 1 / 0.7},  # the keypoints' rectangle has 0.7 of the view's side
    }
    write_checkpoint(out, 0, {"config": config, "network": network.state_dict()})
    return f"{out}: pose network on a {name}, its keypoints in FreiHAND's order"


OPSET: Final = 18  # onnxruntime 1.14 and later support it
INPUTS: Final = ("image", "intrinsics")
OUTPUTS: Final = ("keypoints_px", "joints")
PARITY: Final = (1e-3, 1e-4)
"""Largest differences from torch: of keypoints in pixels, of joints as a share of the largest coordinate."""


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
        state, note = weights.vitpose_from_timm(state), _vitpose_note(encoder.network)
        card["height_width_px"] = weights.VITPOSE_PICTURE_PX
    state = {key: tensor.float() if tensor.is_floating_point() else tensor for key, tensor in state.items()}
    is_wrapped = keys == "vitpose" and out.suffix == ".pth"
    save_tensors({"state_dict": state} if is_wrapped else state, out, card | {"tensors": note})
    return f"{name} of {path}, {note}"


def _vitpose_note(vit: Any) -> str:
    """The call that builds the network of a file: ViTPose's own small ViT has more heads than timm's."""
    heads, ratio = vit.blocks[0].attn.num_heads, vit.blocks[0].mlp.fc1.out_features / vit.embed_dim
    sizes = f"embed_dim={vit.embed_dim}, depth={len(vit.blocks)}, num_heads={heads}, mlp_ratio={ratio:g}"
    return f"for ViTPose's ViT(img_size=(256, 192), patch_size=16, {sizes}, qkv_bias=True)"


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


def random_views(count: int, side_px: int, *, seed: int) -> tuple[Tensor, Tensor]:
    """Random pictures (count, 3, S, S), and camera matrices (count, 3, 3) as of views: rotated and off centre."""
    generator = torch.Generator().manual_seed(seed)
    image = torch.randint(0, 256, (count, 3, side_px, side_px), generator=generator, dtype=torch.uint8)
    intrinsics = side_px * (3 * torch.eye(3) + torch.rand(count, 3, 3, generator=generator))
    intrinsics[:, 2] = torch.tensor([0.0, 0.0, 1.0])
    return image, intrinsics


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
        UserError: `source` is no fine-tuning run, `out` cannot be written, or the file's results differ from torch's.
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
    program.model.metadata_props["preprocessing"] = json.dumps(preprocessing(run))
    model = program.model_proto.SerializeToString()
    views = random_views(3, side_px, seed=3)  # another batch size than the traced one
    session: Any = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    found = session.run(list(OUTPUTS), {name: view.numpy() for name, view in zip(INPUTS, views, strict=True)})
    with torch.inference_mode():
        wanted = [output.numpy() for output in network(*views)]
    off_px, off = (float(np.abs(one - other).max()) for one, other in zip(found, wanted, strict=True))
    if not (off_px <= PARITY[0] and off <= PARITY[1] * max(1.0, np.abs(wanted[1]).max())):
        raise UserError(
            f"{out} was not written: in onnxruntime the network's keypoints are up to {off_px:.2g} px from torch's, "
            f"its joints {off:.2g} reference bones"
        )
    write_bytes(out, model)
    write_text(card_beside(out), json.dumps(model_card(to_dict(run.config), run.step, run.path), indent=2))
    return (
        f"{run.config.encoder.name} with its pose head, views of {side_px} px, any batch, opset {OPSET}; at most "
        f"{off_px:.1g} px from torch in onnxruntime"
    )


def preprocessing(run: PoseRun) -> dict[str, Any]:
    """What the ONNX file says about its inputs and outputs."""
    geometry = run.config.geometry
    return {
        "image": "uint8 RGB, NCHW: the square about the box's centre, its side the box's longer one times box_margin",
        "frame": "corner-based: the centre of the first pixel is (0.5, 0.5); OpenCV counts it as (0, 0)",
        "side_px": geometry.side_px,
        "box_margin": run.box_margin,
        "halved_before_the_warp": geometry.antialias,
        "outside_of_the_picture": geometry.fill,
        "keypoints": HAND.keypoints,
        "keypoint_0_of_keypoints_px": "palm" if run.config.pose.first_keypoint == "palm" else "wrist",
        "joints": "in the camera's frame, in lengths of the middle finger's first phalanx",
        "depths_were_learnt": run.depth,
    }
