"""Configuration of the networks and of the loss of pre-training.

This file imports neither torch nor DALI nor Numba, so that a mistake in a configuration is reported at once.
"""

from typing import Annotated, Literal

from pydantic import Field, field_validator
from pydantic.dataclasses import dataclass

from peclr_dali.bounds import STRICT, Positive, Width, one_of
from peclr_dali.skeleton import HAND

Variant = Literal["paper", "upstream", "direct", "none"]
Extent = Literal["axis", "scalar"]

NT_XENT = "nt_xent"
"""Value of `loss.name`, unless a program brings its own loss."""

ENCODERS = {
    **dict.fromkeys(
        ("resnet18", "resnet34", "resnet50", "resnet101", "resnet152"), "peclr_dali.models.encoders:ResNet"
    ),
    "timm/": "peclr_dali.models.timm_encoder:TimmEncoder",
}
"""Name of an encoder, or of a family up to its slash -> "module:class" of its `Encoder`, imported when it is built."""

WEIGHTS_EXPECTED = (
    'the weights of a torchvision ResNet or a model of timm (.pth or .safetensors), "imagenet", "random", or a run\'s '
    "folder to fine-tune"
)


@dataclass(frozen=True, config=STRICT)
class EncoderConfig:
    """The encoder and its starting weights.

    Attributes:
        name: a torchvision ResNet, or "timm/" and the name of a model of timm, such as "timm/vit_small_patch16_224".
        weights: "imagenet" (torchvision's IMAGENET1K_V1, as in the authors' code, or what timm publishes for its
            model), "random", or the path of a file: weights of a torchvision ResNet or a timm model (.safetensors or
            .pth), published weights or a Lightning checkpoint of the authors or of SiMHand, a checkpoint of ours, or
            the name of a network that comes with the package, "peclr_rn18".
    """

    name: str = "resnet50"
    weights: str = "imagenet"

    @field_validator("name")
    @classmethod
    def _is_known(cls, value: str) -> str:
        if encoder_class(value) is None:
            known = ", ".join(repr(name) for name in ENCODERS if not name.endswith("/"))
            raise ValueError(f"input should be {known} or a model of timm such as 'timm/vit_small_patch16_224'")
        return value


def encoder_class(name: str) -> str | None:
    """The value in `ENCODERS` for the name of an encoder; None if there is none."""
    family, slash, _ = name.partition("/")
    return ENCODERS.get(family + slash)


@dataclass(frozen=True, config=STRICT)
class ProjectorConfig:
    """Sizes of the projection head; the defaults are the authors'.

    Attributes:
        hidden: width of the hidden layer.
        dim: D = 2m, length of a projection, which is m points (x, y).
    """

    hidden: Width = 512
    dim: Annotated[Width, Field(multiple_of=2)] = 128


@dataclass(frozen=True, config=STRICT)
class EquivarianceConfig:
    """How the augmentation is undone in the projections.

    Attributes:
        variant: "paper", "upstream" (the authors' code), "direct" (the supplement's ablation) or "none" (SimCLR).
        range: latent extent that scales a translation: per "axis", or one "scalar" over all numbers of a projection.
            Only for "paper". The paper does not define it; only "axis" gives an exact inverse.
        detach_range: take no gradient through the range. Only for "paper".
    """

    variant: Variant = "paper"
    range: Extent = "axis"
    detach_range: bool = True


@dataclass(frozen=True, config=STRICT)
class LossConfig:
    """The loss of pre-training.

    Attributes:
        name: "nt_xent"; `pretrain(config, loss=...)` enters the name of another loss.
        temperature: of "nt_xent"; divides the cosine. The default is the authors' value; the paper gives none.
    """

    name: str = NT_XENT
    temperature: Positive = 0.5


@dataclass(frozen=True, config=STRICT)
class PoseConfig:
    """The pose head on the encoder.

    Attributes:
        head: "linear", one layer (full fine-tuning), or "mlp", two (on a frozen encoder): paper, supplement.
        hidden: width of the hidden layer of "mlp".
        root: keypoint that depths are relative to. The paper does not name it.
        refine: correct the root's depth by an MLP (Spurr et al. 2020).
        first_keypoint: meaning of keypoint 0 in the network: the "wrist", or the "palm", halfway between wrist
            and middle_mcp, as in the authors' published models. The predicted joints have the wrist in both cases.
        weights: "auto": those of the head in `encoder.weights`, if that is a fine-tuned network with this very head
            and root; else random ones. "random": always random ones.
    """

    head: Literal["linear", "mlp"] = "linear"
    hidden: Width = 512
    root: Annotated[str, one_of(HAND.keypoints)] = "wrist"
    refine: bool = True
    first_keypoint: Literal["wrist", "palm"] = "wrist"
    weights: Literal["auto", "random"] = "auto"
