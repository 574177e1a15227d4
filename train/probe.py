"""What can be read from the features of a frozen encoder: a probe during pre-training, and a fitted linear head."""

import dataclasses
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from peclr_dali.errors import UserError
from peclr_dali.models.encoders import Encoder, make_encoder
from peclr_dali.models.network import ContrastiveNetwork, Normalize
from peclr_dali.pipelines.arrays import BoolArray, FloatArray, IntArray, PixelArray
from peclr_dali.pipelines.batch import Batch
from peclr_dali.pipelines.samples.index import Index
from peclr_dali.pipelines.samples.subsets import in_fraction
from peclr_dali.pipelines.sources import load_index
from peclr_dali.skeleton import HAND
from peclr_dali.train.config.finetuning import FinetuneConfig
from peclr_dali.train.config.load import to_dict
from peclr_dali.train.config.pretraining import Config
from peclr_dali.train.distributed.world import World, described_world, on_all_ranks, single_process
from peclr_dali.train.pose.inference import Progress, canonical_loader, inference
from peclr_dali.train.pose.labels import labels_to_learn
from peclr_dali.train.pose.pose_run import start_pose_network
from peclr_dali.train.runs.folder import Resume, RunFolder
from peclr_dali.train.runs.log import progress_bar
from peclr_dali.train.runs.run import set_threads
from peclr_dali.train.steps.train_state import TrainState, autocast_dtype

log = logging.getLogger(__name__)

_FITTED = 0.75
_NEEDED = 8  # images, of which some are almost surely fitted to, and some measured
_SHARE = 1 / 16  # of the images that are trained on between two probes
# Views that pass an encoder together, whatever the number of ranks, so that a feature does not depend on it.
_CHUNK = 64


def trained_encoder(saved: Mapping[str, Any], origin: str, config: Config | FinetuneConfig) -> Encoder:
    """The encoder of a checkpoint's content, in eval mode. One that does not fit is a `UserError` with the origin."""
    encoder = make_encoder(config.encoder.name, config.geometry.side_px)
    encoder.load_weights(saved["network"], origin, config.encoder.name)
    return encoder.eval()


def of_canonical_views(
    function: Callable[[Batch], Sequence[Tensor]],
    index: Index,
    rows: IntArray,
    config: Config | FinetuneConfig,
    world: World,
    progress: Progress = lambda *_: None,
) -> tuple[Tensor, list[Tensor]]:
    """What a function gives for this rank's share of the canonical views of N rows of an index.

    Args:
        function: takes a batch of B views on the world's device; returns tensors (B, ...). It runs without gradients.

    Returns:
        (n,) the places among the N rows, ascending, of this rank's images that can be read; and the function's tensors
        for them, (n, ...) each, on the CPU.

    Raises:
        UserError: so many files are bad that no substitute is left.
    """
    wanted, count = torch.from_numpy(rows), len(rows)
    places, tables = [], []
    with canonical_loader(index, rows, _CHUNK, config, world) as loader, inference(world.device):
        for batch in loader:
            at = batch.positions
            kept = (at < count) & (batch.samples[:, 0] == wanted[at % count])  # no surplus rows, no substitutes
            places.append(at[kept])
            tables.append([table.cpu()[kept] for table in function(batch.to(world.device))])
            progress(min(int(at[-1]) + 1, count), count)
    return torch.cat(places), [torch.cat(parts) for parts in zip(*tables, strict=True)]


def features_of_rows(
    encoder: Encoder | None,
    index: Index,
    rows: IntArray,
    config: Config | FinetuneConfig,
    progress: Progress,
) -> tuple[IntArray, FloatArray, PixelArray]:
    """The features of the canonical views of N rows of an index, computed by one process in float32.

    Args:
        encoder: in eval mode; None: the features are the pixels.
        config: of the run whose views are taken.

    Returns:
        The places (n,) among the N rows of the images that can be read, their features (n, D), and their views
        (n, S, S, 3).

    Raises:
        UserError: so many files are bad that no substitute is left.
    """
    world = single_process()
    normalize = Normalize().to(world.device)
    encoder = None if encoder is None else encoder.to(world.device)

    def read(batch: Batch) -> Sequence[Tensor]:
        image = batch.views[0].image
        return (image.flatten(1) if encoder is None else encoder(normalize(image))).float(), image.permute(0, 2, 3, 1)

    places, (features, views) = of_canonical_views(read, index, rows, config, world, progress)
    return places.numpy(), features.numpy(), views.numpy()


ALPHA = 100.0
"""Weight of the squared coefficients of standardised features, as in scikit-learn."""


def fit_ridge(features: Tensor, targets: Tensor, alpha: float) -> tuple[Tensor, Tensor]:
    """Minimise |targets - X W - b|^2 + alpha |W|^2, where X are the standardised features; b is not penalised.

    scikit-learn's StandardScaler and Ridge(alpha) give the same map.

    Args:
        features: (N, D) float64.
        targets: (N, T) float64.
        alpha: positive, so that there is one solution for any N > 0.

    Returns:
        Weight (T, D) and bias (T,) of the map of features as they are, as in `torch.nn.Linear`.
    """
    mean, deviation = features.mean(0), features.std(0, correction=0)
    # The rounding of the mean leaves a constant feature a tiny deviation.
    deviation = deviation.where(deviation > 1e-12 * mean.abs(), 1.0)
    standardised, intercept = (features - mean) / deviation, targets.mean(0)
    gram = standardised.mT @ standardised
    gram.diagonal().add_(alpha)
    weight = (torch.linalg.solve(gram, standardised.mT @ (targets - intercept)) / deviation[:, None]).mT
    return weight, intercept - weight @ mean


class Probe:
    """This rank's share of the labelled images, as canonical views in memory, and the 2D keypoints of all images.

    Args:
        index: the images.
        rows: (N,) of the index, with known keypoints. A file that cannot be read is left out.
        fitted: (N,) bool, the rows on which the probe is fitted. Its error is measured on the others.
        config: configuration of the run.
        world: this rank among all.

    Attributes:
        usable: whether there are images to fit on, and other images to measure on.

    Raises:
        UserError: so many files are bad that no substitute is left.
    """

    def __init__(self, index: Index, rows: IntArray, fitted: BoolArray, config: Config, world: World) -> None:
        self._world, side_px = world, config.geometry.side_px

        def read(batch: Batch) -> Sequence[Tensor]:
            assert index.keypoints_px is not None  # else no row is chosen
            affine = batch.views[0].source_to_view_px.cpu().double()
            points_px = torch.from_numpy(index.keypoints_px[batch.samples[:, 0].numpy()]).double()
            return batch.views[0].image, points_px @ affine[:, :, :2].mT + affine[:, None, :, 2]

        with on_all_ranks(world):
            places, (images, points_px) = of_canonical_views(read, index, rows, config, world)
        self._chunks = [*zip(torch.split(places, _CHUNK), torch.split(images, _CHUNK), strict=True)]
        table = torch.zeros(len(rows), 2 * len(HAND) + 1, dtype=torch.float64)
        table[places, :-1], table[places, -1] = points_px.flatten(1) / side_px - 0.5, 1
        table = world.sum_(table)  # exact: every number but one of each sum is zero
        readable, chosen = table[:, -1] == 1, torch.from_numpy(fitted)
        self._targets = table[:, :-1]  # (N, 2 K), in sides of the view, from its centre
        self._fitted, self._measured = readable & chosen, readable & ~chosen
        self.usable = bool(self._fitted.sum() > 1) and bool(self._measured.any())

    def figures(self, network: ContrastiveNetwork, autocast_dtype: torch.dtype | None) -> dict[str, float]:
        """Fit the probe to the present encoder and measure it. The result is the same on all ranks.

        Returns:
            "epe_px_of_224": the mean 2D error in pixels of a canonical view of 224 x 224 (not of the source), on the
            images that were not used for fitting; NaN if a feature is not finite. "constant_epe_px_of_224": that of the
            mean keypoints of the images that it is fitted on.
        """
        known, true = self._targets[self._fitted], self._targets[self._measured]
        figures = {"epe_px_of_224": math.nan, "constant_epe_px_of_224": _epe_px_of_224(known.mean(0), true)}
        features = self._features(network, autocast_dtype)
        if features.isfinite().all():
            weight, bias = fit_ridge(features[self._fitted], known, ALPHA)
            figures["epe_px_of_224"] = _epe_px_of_224(features[self._measured] @ weight.mT + bias, true)
        return figures

    def _features(self, network: ContrastiveNetwork, autocast_dtype: torch.dtype | None) -> Tensor:
        """Features (N, D) of all images, float64, on the CPU. The network's mode is restored."""
        device, training = self._world.device, network.training
        network.eval()
        table = torch.zeros(len(self._targets), network.encoder.feature_dim, dtype=torch.float64, device=device)
        with (
            torch.inference_mode(),
            torch.autocast(device.type, dtype=autocast_dtype, enabled=autocast_dtype is not None),
        ):
            for places, image in self._chunks:
                table[places.to(device)] = network.encoder(network.normalize(image.to(device))).double()
        network.train(training)
        return self._world.sum_(table).cpu()


def _epe_px_of_224(read: Tensor, true: Tensor) -> float:
    """Mean distance of keypoints (M, 2 K) or (2 K,) from true ones (M, 2 K), in sides of the view, in px of 224."""
    return 224 * float((read - true).reshape(len(true), -1, 2).norm(dim=2).mean())


def build_probe(index: Index, config: Config, world: World) -> Probe | None:
    """The probe of a run. If there are too few images: None, and a line in the log. Errors as `Probe`."""
    rows, fitted = probed_rows(index, config)
    probe = Probe(index, rows, fitted, config, world) if len(rows) > 0 else None
    if probe is None or not probe.usable:
        log.info(
            "no probe: %d of the %d images of %s are chosen at probe.every_epochs = %g; expected about %d with all "
            "keypoints, in several groups, since a group, such as the images of one pose, stays together",
            *(len(rows), len(index), index.root, config.probe.every_epochs, _NEEDED),
        )
        return None
    return probe


def probed_rows(index: Index, config: Config) -> tuple[IntArray, BoolArray]:
    """Rows (N,) of the images to probe, whose keypoints are all known, and (N,) bool, the rows to fit on.

    A group stays together.
    """
    known = np.zeros(0, bool) if index.keypoints_px is None else np.isfinite(index.keypoints_px).all(axis=(1, 2))
    rows = np.flatnonzero(known)
    wanted = min(config.probe.images, _SHARE * config.probe.every_epochs * len(index))
    group = index.groups
    rows = rows[in_fraction(group[rows], min(1.0, wanted / max(1, len(rows))), seed=0)]
    return rows, in_fraction(group[rows], _FITTED, seed=1)


class ProbeValidator:
    """Probes the encoder of pre-training: after the first step, every so many epochs, and after the last step.

    Raises:
        UserError: so many files are bad that no substitute is left.
    """

    def __init__(
        self, config: Config, index: Index, network: ContrastiveNetwork, state: TrainState, world: World
    ) -> None:
        self._network, self._state, self._autocast_dtype = network, state, autocast_dtype(config, world)
        every_epochs, steps_per_epoch = config.probe.every_epochs, state.total_steps // config.train.epochs
        self._every = max(1, round(every_epochs * steps_per_epoch))
        self._probe = build_probe(index, config, world) if every_epochs > 0 else None

    def should_validate(self, step: int) -> bool:
        """See `trainer.Validator`."""
        return self._probe is not None and (step in (1, self._state.total_steps) or step % self._every == 0)

    def validate(self, step: int) -> dict[str, float]:
        """See `trainer.Validator`."""
        assert self._probe is not None  # else it should not
        return {"step": step, **self._probe.figures(self._network, self._autocast_dtype)}


def fit_read_out(config: FinetuneConfig, resume: Resume = "never") -> RunFolder:
    """Fit a linear head to the features of a frozen encoder, by ridge regression on canonical views.

    The result is a run's folder like fine-tuning's. The head is linear and the root's depth is not refined, whatever
    `config.pose` says; the precision is fp32. Nothing is augmented.

    Args:
        config: data, size of the views, encoder with its weights, folder of the run. Keys of training are not used.
        resume: "auto": a fit that is there already is kept.

    Raises:
        UserError: the input cannot be used, no image has all its labels, or there are several processes.
    """
    config = dataclasses.replace(
        config,
        pose=dataclasses.replace(config.pose, head="linear", refine=False),
        train=dataclasses.replace(config.train, precision="fp32", frozen=True),
    )
    world, folder = described_world(config.train.device), RunFolder(Path(config.run.out), keep=1)
    if world.world_size > 1:
        raise UserError(
            f"a read-out is fitted by one process, and torchrun started {world.world_size}: leave torchrun out"
        )
    with folder.lock():
        if folder.check(config, resume) is not None:
            log.info("%s holds the fitted head already", folder.root)
            return folder
        set_threads(config.train.threads, world)
        torch.manual_seed(config.run.seed)
        index = load_index(config.data)
        labels = labels_to_learn(index)
        network = start_pose_network(config.encoder, config.pose, config.geometry.side_px).network
        network = network.to(world.device).eval()
        folder.claim(config, 0)

        def read(batch: Batch) -> Sequence[Tensor]:
            view = batch.views[0]
            true = labels.of_view(view, batch.samples[:, 0], config.pose, torch.float64)
            depth = true.relative_depth if labels.in_metres else torch.zeros_like(true.relative_depth)
            # As a linear head of `PoseNetwork` gives them: x and y in sides of the view, from its middle.
            wanted = torch.cat([true.keypoints_px / config.geometry.side_px - 0.5, depth[..., None]], dim=2)
            return network.features(view.image).double(), wanted.flatten(1)

        with progress_bar("reading features") as progress:
            _, (features, targets) = of_canonical_views(read, index, np.arange(len(index)), config, world, progress)
        known = targets.isfinite().all(dim=1)
        if not known.any():
            raise UserError(f"{index.root} ({index.name}): no image has all its labels: use another source")
        weight, bias = fit_ridge(features[known], targets[known], ALPHA)
        network.head.load_state_dict({"weight": weight, "bias": bias})
        folder.checkpoints.save(
            1, {"config": to_dict(config), "network": network.state_dict(), "depth": labels.in_metres}
        )
        log.info("%s: head fitted to %d of %d images", folder.root, int(known.sum()), len(index))
    return folder
