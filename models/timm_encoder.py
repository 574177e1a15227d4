"""Encoders of the package timm, by timm's names of models, such as "timm/vit_small_patch16_224"."""

import importlib
import logging
import sys
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from peclr_dali.errors import UserError, in_one_line
from peclr_dali.models.encoders import Encoder
from peclr_dali.models.network import IMAGENET_MEAN, IMAGENET_STD

log = logging.getLogger(__name__)

# Attributes that hold rates of dropout and stochastic depth, besides `p` and `prob` of modules named Drop.
_RATES = ("drop_prob", "drop_rate", "attn_drop_p", "dropout")


class TimmEncoder(Encoder):
    """A model of timm up to its pooled features, for views of `side_px`.

    Dropout and stochastic depth are off, since a recomputed pass must equal the first. A transformer is built for
    `side_px`; if weights were made for another size, timm resamples their position embeddings.

    Raises:
        UserError: timm has no such model, or the model does not fit `side_px` or the exact gradient.
    """

    library = "timm"

    def __init__(self, name: str, side_px: int | None = None) -> None:
        super().__init__()
        key, self._model = f"encoder.name = {name!r}", name.removeprefix("timm/")
        self._timm: Any = importlib.import_module("timm")
        published = self._timm.get_pretrained_cfg(self._model)
        native_px = published.input_size[-1] if published is not None else 224
        side_px = side_px or native_px
        self._options = {"num_classes": 0}
        if published is not None and published.fixed_input_size:
            self._options["img_size"] = side_px
        try:
            self.network: nn.Module = self._timm.create_model(self._model, **self._options)
            heads = getattr(self.network, "pretrained_cfg", {}).get("classifier") or ()
            self.classifier = tuple(f"{head}." for head in ([heads] if isinstance(heads, str) else heads))
            patch = getattr(getattr(self.network, "patch_embed", None), "patch_size", 1)
            patch_px = patch if isinstance(patch, int) else patch[-1]
            if side_px % patch_px:  # timm may leave out the last rows and columns
                raise ValueError(f"expected a multiple of its patch size, {patch_px} pixels")
            _disable_dropout(self.network)
            first, second = _two_passes(self.network, side_px)
        except Exception as error:  # each model raises its own
            raise UserError(
                f"{key} with geometry.side_px = {side_px}: timm cannot build it ({in_one_line(error)}). Set another "
                f"encoder, or geometry.side_px; its published weights expect views of {native_px} pixels."
            ) from error
        if not first.is_meta and not torch.allclose(first, second, rtol=1e-3, atol=1e-5):
            raise UserError(f"{key} is random in training, so recomputing differs: choose an encoder without dropout")
        self.feature_dim = first.shape[1]

    def undecayed(self) -> Collection[str]:
        """Parameters that timm exempts from weight decay, such as position embeddings and class tokens."""
        return getattr(self.network, "no_weight_decay", tuple)()

    def note_on_file(self, file: Path) -> str:
        """The call of timm that reads the file."""
        options = ", ".join(f"{name}={value}" for name, value in self._options.items())
        return f"for timm.create_model({self._model!r}, checkpoint_path={str(file)!r}, {options})"

    def resampled(self, state: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Position embeddings for views of another size, and the names of a model's authors, are converted by timm."""
        if any(key not in state or state[key].shape != own.shape for key, own in self.network.state_dict().items()):
            with suppress(Exception):  # no such function, or a state of another model, for which each raises its own
                module: Any = sys.modules[type(self.network).__module__]
                return dict(module.checkpoint_filter_fn(dict(state), self.network))
        return state

    def published_state(self) -> tuple[Mapping[str, Tensor], str]:
        """The weights that timm publishes under this name. They may have been trained on any dataset."""
        published = self._timm.get_pretrained_cfg(self._model)
        try:
            network = self._timm.create_model(self._model, pretrained=True, **self._options)
        except Exception as error:  # no network, no such weights, a broken cache: each has its own
            raise UserError(
                f'encoder.weights = "imagenet": timm\'s weights of {self._model} cannot be downloaded '
                f'({in_one_line(error)}): set encoder.weights = "random", or to the path of a file of weights.'
            ) from error
        if (published.mean, published.std) != (IMAGENET_MEAN, IMAGENET_STD):
            log.warning(
                "%s: its weights were trained with pixel mean %s and deviation %s; this project uses those of ImageNet",
                self._model, published.mean, published.std,
            )  # fmt: skip
        return network.state_dict(), f"timm's weights of {self._model}"


def _disable_dropout(network: nn.Module) -> None:
    """Set all rates of dropout and stochastic depth to 0."""
    for module in network.modules():
        for rate in (*_RATES, "p", "prob") if "Drop" in type(module).__name__ else _RATES:
            if isinstance(getattr(module, rate, None), float):
                setattr(module, rate, 0.0)


def _two_passes(network: nn.Module, side_px: int) -> tuple[Tensor, Tensor]:
    """The features (2, C) of two passes of the same two pictures, in training; buffers stay as they are."""
    buffers = {name: buffer.clone() for name, buffer in network.named_buffers()}
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        image = torch.rand(2, 3, side_px, side_px)
        first, second = (functional_call(network, buffers, (image,)) for _ in range(2))
    if not isinstance(first, Tensor) or first.ndim != 2:
        raise ValueError("it does not give one vector of features per image")
    return first, second
