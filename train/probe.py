"""Linear probe: measures during training how well keypoints can be read from the encoder's frozen features."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from peclr_dali.models.config import PoseConfig
from peclr_dali.models.encoders import Encoder, make_encoder
from peclr_dali.models.network import ContrastiveNetwork, Normalize
from peclr_dali.models.pose import back_project, normalize_keypoints
from peclr_dali.pipelines.batch import Batch
from peclr_dali.pipelines.samples.index import Index
from peclr_dali.pipelines.sources.subsets import in_fraction
from peclr_dali.skeleton import HAND
from peclr_dali.train.config.finetuning import FinetuneConfig
from peclr_dali.train.config.pretraining import Config
from peclr_dali.train.distributed.all_ranks import on_all_ranks
from peclr_dali.train.distributed.world import World, single_process
from peclr_dali.train.evaluation.errors import constant_pose_errors
from peclr_dali.train.pose.inference import Progress, canonical_loader, inference
from peclr_dali.train.pose.labels import PoseLabels, PoseTargets
from peclr_dali.train.pose.metrics import in_one_place, pose_tables

Floats = npt.NDArray[np.float32]
Pixels = npt.NDArray[np.uint8]

_CHUNK = 64
"""Views that pass an encoder together, whatever the number of ranks, so that a feature does not depend on it."""


def trained_encoder(saved: Mapping[str, Any], origin: str, config: Config | FinetuneConfig) -> Encoder:
    """The encoder of a checkpoint's content, in eval mode. One that does not fit is a `UserError` with the origin."""
    encoder = make_encoder(config.encoder.name, config.geometry.side_px)
    encoder.load_weights(saved["network"], origin, config.encoder.name)
    return encoder.eval()


def canonical_batches(
    index: Index, rows: npt.NDArray[np.int64], config: Config | FinetuneConfig, world: World
) -> Iterator[tuple[Batch, Tensor]]:
    """This rank's share of the canonical views of N rows of an index, in batches of one size on the world's device.

    Yields:
        A batch, and (B,) bool, on the CPU: whether its positions are those of `rows`. The others are surplus rows of
        the last step and substitutes of bad files.

    Raises:
        UserError: so many files are bad that no substitute is left.
    """
    wanted, count = torch.from_numpy(rows), len(rows)
    with canonical_loader(index, rows, _CHUNK, config, world) as loader:
        for batch in loader:
            positions = batch.positions
            yield batch.to(world.device), (positions < count) & (batch.samples[:, 0] == wanted[positions % count])


def features_of_rows(
    encoder: Encoder | None,
    index: Index,
    rows: npt.NDArray[np.int64],
    config: Config | FinetuneConfig,
    progress: Progress,
) -> tuple[npt.NDArray[np.bool_], Floats, Pixels]:
    """The features of the canonical views of N rows of an index, computed by one process in float32.

    Args:
        encoder: in eval mode; None: the features are the pixels.
        config: of the run whose views are taken.

    Returns:
        Which images could be read (N,), the features (N, D), and the views (N, S, S, 3).

    Raises:
        UserError: so many files are bad that no substitute is left.
    """
    world, count, side_px = single_process(), len(rows), config.geometry.side_px
    normalize = Normalize().to(world.device)
    encoder = None if encoder is None else encoder.to(world.device)
    width = 3 * side_px**2 if encoder is None else encoder.feature_dim
    readable, features = np.zeros(count, np.bool_), np.zeros((count, width), np.float32)
    views = np.zeros((count, side_px, side_px, 3), np.uint8)
    with inference(world.device):
        for batch, kept in canonical_batches(index, rows, config, world):
            places, image = batch.positions[kept].numpy(), batch.views[0].image
            found = image.flatten(1) if encoder is None else encoder(normalize(image))
            features[places] = found.float().cpu()[kept].numpy()
            views[places] = image.permute(0, 2, 3, 1).cpu()[kept].numpy()
            readable[places] = True
            progress(int(readable.sum()), count)
    return readable, features, views


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
    coefficients = torch.linalg.solve(gram, standardised.mT @ (targets - intercept))
    weight = (coefficients / deviation[:, None]).mT
    return weight, intercept - weight @ mean


def poses_to_read(targets: PoseTargets, side_px: int) -> Tensor:
    """2.5D poses (N, K, 3), as a linear head of `PoseNetwork` gives them.

    x and y are from the middle of the view, in sides of it; the depth is minus the root's, over the reference bone's
    length, NaN if it is not known.
    """
    return torch.cat([targets.keypoints_px / side_px - 0.5, targets.relative_depth[..., None]], dim=2)


log = logging.getLogger(__name__)

Rows = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

_FITTED = 0.75
_NEEDED = 8  # images, of which some are almost surely fitted to, and some measured
_SHARE = 1 / 16  # of the images that are trained on between two probes


class Probe:
    """This rank's share of the labelled images, as canonical views in memory, and the targets of all images.

    A target is a 2.5D pose (`poses_to_read`). With the root's true depth, it becomes 3D.

    Args:
        index: the images.
        rows: (N,) of the index. A file that cannot be read is left out.
        fitted: (N,) bool, the rows on which the probe is fitted. Its error is measured on the others.
        config: configuration of the run.
        world: this rank among all.

    Raises:
        UserError: so many files are bad that no substitute is left.
    """

    def __init__(self, index: Index, rows: Rows, fitted: Bools, config: Config, world: World) -> None:
        self._world, self._alpha, self._side_px = world, config.probe.ridge, config.geometry.side_px
        self._views: list[tuple[Tensor, Tensor]] = []  # positions, pixels
        labels, pose = PoseLabels.of(index), PoseConfig()
        widths = [3 * len(HAND), 9, 1, 1, 1]  # the parts of `known`
        table = torch.zeros(len(rows), sum(widths), dtype=torch.float64)

        def load() -> None:
            for batch, kept in canonical_batches(index, rows, config, world):
                samples = batch.samples[:, 0]
                targets = labels.of_view(batch.views[0], samples, pose, torch.float64)
                known = [
                    poses_to_read(targets, self._side_px), targets.intrinsics, targets.root_depth,
                    torch.from_numpy(labels.scale_m[samples.numpy()]), torch.ones(len(batch)),
                ]  # fmt: skip
                columns = [part.cpu().double().reshape(len(batch), -1) for part in known]
                table[batch.positions[kept]] = torch.cat(columns, dim=1)[kept]
                self._views.append((batch.positions[kept], batch.views[0].image.cpu()[kept]))

        on_all_ranks(world, load)
        table = world.sum_(table)  # exact: every number but one of each sum is zero
        targets, intrinsics, self._root_depth, self._scale_m, is_read = torch.split(table, widths, dim=1)
        self._intrinsics = intrinsics.reshape(-1, 3, 3)
        readable, chosen = is_read[:, 0] == 1, torch.from_numpy(fitted)
        self._fitted, self._measured = readable & chosen, readable & ~chosen
        self._in_3d = bool(targets[readable].isfinite().all())
        self._targets = targets if self._in_3d else self._in_2d(targets).flatten(1)
        self._constants = self._errors_of_constants() if self.usable else {}

    @property
    def usable(self) -> bool:
        """Whether there are images to fit on, and other images to measure on."""
        return bool(self._fitted.sum() > 1) and bool(self._measured.any())

    def figures(self, network: ContrastiveNetwork, autocast_dtype: torch.dtype | None) -> dict[str, float]:
        """Fit the probe to the present encoder and measure it. The result is the same on all ranks.

        Returns:
            Errors on the images that were not used for fitting: "epe_px_of_224", the mean 2D error in pixels of a
            canonical view of 224 x 224 (not of the source), and "pa_epe_cm", NaN where depths are not known; both NaN
            if a feature is not finite. "constant_" and these names: the errors of the mean keypoints and of one rigid
            pose of the images that it is fitted on, see `peclr_dali.train.evaluation.errors`.
        """
        figures = dict.fromkeys(("epe_px_of_224", "pa_epe_cm"), math.nan) | self._constants
        features = self._features(network, autocast_dtype)
        if features.isfinite().all():
            weight, bias = fit_ridge(features[self._fitted], self._targets[self._fitted], self._alpha)
            read, true = features[self._measured] @ weight.mT + bias, self._targets[self._measured]
            figures["epe_px_of_224"] = 224 * float((self._in_2d(read) - self._in_2d(true)).norm(dim=2).mean())
            if self._in_3d:
                poses_m = [self._in_3d_m(table, self._measured).numpy() for table in (read, true)]
                figures["pa_epe_cm"] = float(pose_tables(*poses_m)["pa_epe_cm"].mean())
        return figures

    def _errors_of_constants(self) -> dict[str, float]:
        each = [(self._targets[rows], rows) for rows in (self._fitted, self._measured)]
        known, measured = (self._in_2d(true) for true, _ in each)
        errors = {"constant_epe_px_of_224": 224 * float((measured - known.mean(dim=0)).norm(dim=2).mean())}
        if self._in_3d:
            known_m, measured_m = (self._in_3d_m(true, rows).numpy() for true, rows in each)
            errors["constant_pa_epe_cm"] = constant_pose_errors(known_m, measured_m)["rigid_pose"]["pa_epe_cm"]
        return errors

    def _features(self, network: ContrastiveNetwork, autocast_dtype: torch.dtype | None) -> Tensor:
        """Features (N, D) of all images, float64, on the CPU. The network's mode is restored."""
        device, training = self._world.device, network.training
        network.eval()
        found = []
        with (
            torch.inference_mode(),
            torch.autocast(device.type, dtype=autocast_dtype, enabled=autocast_dtype is not None),
        ):
            for _, image in self._views:
                found.append(network.encoder(network.normalize(image.to(device))).double())
        network.train(training)
        everything = torch.zeros(len(self._targets), network.encoder.feature_dim, dtype=torch.float64, device=device)
        for (positions, _), features in zip(self._views, found, strict=True):
            everything[positions.to(device)] = features
        return self._world.sum_(everything).cpu()

    def _in_3d_m(self, table: Tensor, rows: Tensor) -> Tensor:
        """Convert 2.5D poses (M, 3 K) of the images at `rows`, M of which are true, to 3D poses (M, K, 3) in metres."""
        depth = self._root_depth[rows] + table[:, 2::3]
        normalized = normalize_keypoints(self._side_px * (self._in_2d(table) + 0.5), self._intrinsics[rows])
        return back_project(normalized, depth) * self._scale_m[rows][:, :, None]

    def _in_2d(self, table: Tensor) -> Tensor:
        """The 2D keypoints (M, K, 2), in sides of the view, of 2.5D or 2D poses."""
        return table.reshape(len(table), len(HAND), -1)[..., :2]


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


def probed_rows(index: Index, config: Config) -> tuple[Rows, Bools]:
    """Rows (N,) of the images to probe, and (N,) bool, the rows to fit on. A group stays together.

    All keypoints of these images are known, and all depths if the index has any.
    """
    labels = PoseLabels.of(index)
    seen = np.isfinite(labels.keypoints_px).all(axis=(1, 2))
    in_3d = np.asarray(np.isfinite(labels.joints).all(axis=2))
    deep = seen & in_3d.all(axis=1) & labels.has_camera & np.isfinite(labels.scale_m) & labels.in_metres
    deep &= ~in_one_place(labels.joints, in_3d)
    rows = np.flatnonzero(deep if deep.any() else seen)
    wanted = min(config.probe.images, _SHARE * config.probe.every_epochs * len(index))
    group = index.groups
    rows = rows[in_fraction(group[rows], min(1.0, wanted / max(1, len(rows))), seed=0)]
    return rows, in_fraction(group[rows], _FITTED, seed=1)
