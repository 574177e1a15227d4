"""The loader for a training loop of one's own: `make_loader`, and what it gives."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from numbers import Integral
from pathlib import Path
from typing import Any

import torch

from bounds import LARGEST_COUNT, LARGEST_SEED
from errors import UserError
from machine.ranks import described_ranks
from pipelines.batch import Batch
from pipelines.config import DataConfig, PipelinesConfig
from pipelines.feed import Quarantine
from pipelines.loader import Loader
from pipelines.render.backends import prepare_process
from pipelines.samples.index import Index
from pipelines.samples.order import RankSlice, Schedule, build_order, micro_batch_share, steps_per_epoch
from pipelines.sources import load_index
from pipelines.views.augmentation import AppearanceConfig, Augmentation, ColourConfig, GeometryConfig


def make_loader(
    data: str | Path | Index | DataConfig | Sequence[DataConfig],
    *,
    batch: int,
    seed: int = 0,
    device: torch.device | str | None = None,
    rank: int | None = None,
    world_size: int | None = None,
    micro_batch: int = 1,
    views: int = 2,
    geometry: GeometryConfig = GeometryConfig(),  # noqa: B008  frozen
    colour: ColourConfig = ColourConfig(),  # noqa: B008
    appearance: AppearanceConfig = AppearanceConfig(),  # noqa: B008
    config: PipelinesConfig = PipelinesConfig(),  # noqa: B008
    prepare: bool = False,
) -> EpochLoader:
    """Batches of augmented views with their matrices, for any training loop; docs/library.md shows it at work.

    Args:
        data: a folder with images at any depth; or a dataset's configuration, or several; or their index.
        batch: images in a step, over all ranks. A rank gets an even share of consecutive rows.
        seed: of the order and of all draws.
        device: where the batches are to be; None, the GPU of this local rank if torch sees one, else the CPU.
        rank: of this process; None, what torchrun says in the environment, as for `world_size`.
        world_size: processes that share each batch.
        micro_batch: a rank gets whole micro-batches of so many images, as its `train.ExactStep` takes them; the first
            ranks get one more where the ranks do not divide them.
        views: of each image.
        geometry: ranges of the random affine maps, and the size of the views.
        colour: ranges of the colour jitter.
        appearance: further augmentations of pixels.
        config: how the views are made. Where torchrun does not say how many processes share this machine's cores, set
            `threads` if there are several.
        prepare: set up this process's memory for a faster decoder on a CPU, see `PipelinesConfig.decoder_memory`.

    Raises:
        UserError: the data cannot be used, a batch needs more images or fewer ranks, it is not whole micro-batches, the
            ranks do not fit, a number is out of bounds, or torch cannot use the device.
    """
    _require("batch", batch, 1)
    _require("micro_batch", micro_batch, 1)
    _require("views", views, 1)
    _require("seed", seed, 0, LARGEST_SEED)
    ranks = described_ranks(rank, world_size)
    if batch < ranks.world_size:
        raise UserError(f"batch = {batch} is fewer images than the {ranks.world_size} ranks: expected one for each")
    if device is None:
        device = f"cuda:{ranks.local_rank}" if torch.cuda.is_available() else "cpu"
    place = _usable(device)
    if prepare:
        prepare_process(config, place)
    if isinstance(data, str | Path):
        data = DataConfig(source="folder", root=str(data))
    elif not isinstance(data, Index | DataConfig) and not data:
        raise UserError(f"data = {data!r}: expected a folder, or at least one dataset's configuration")
    return EpochLoader(
        data if isinstance(data, Index) else load_index(data),
        micro_batch_share(batch, micro_batch, ranks.rank, ranks.world_size, table=""),
        batch=batch,
        seed=seed,
        config=config,
        augmentation=Augmentation(geometry, colour, appearance),
        device=place,
        views=views,
        processes_here=ranks.local_world_size,
    )


def _require(name: str, number: Any, least: int, largest: int = LARGEST_COUNT) -> None:
    if not isinstance(number, Integral) or not least <= int(number) <= largest:
        raise UserError(f"{name} = {number!r}: expected a whole number from {least} to {largest}")


def _usable(device: torch.device | str) -> torch.device:
    """The device, a GPU with its number. One that torch does not know or see is a `UserError`."""
    try:
        place = torch.device(device)
    except RuntimeError:
        raise UserError(f"device = {str(device)!r}: expected 'cpu', 'cuda', or 'cuda:N' with a GPU's number") from None
    if place.type == "cuda" and (place.index or 0) >= torch.cuda.device_count():
        seen = torch.cuda.device_count()
        raise UserError(f"device = {str(device)!r}: torch sees {seen} GPUs. Name another device, such as 'cpu'.")
    return torch.device("cuda", torch.cuda.current_device()) if place == torch.device("cuda") else place


class EpochLoader:
    """An epoch of batches for each `for`; `make_loader` makes it.

    A `for` goes through the rest of the epoch that the loader stands in: a whole one, or what is left of it after
    `load_state_dict`. If a `for` is left early, the next one begins the next epoch. The batches of following epochs
    are made ahead of time; `close`, the end of a `with` block or of the process stops that.

    Args:
        index: the samples.
        rows: of each batch, those of this rank.
        batch: samples in a step, over all ranks.
        seed: of the order and of all draws.
        device: where the batches are to be.
        loader: what `pipelines.loader.Loader` takes besides.

    Attributes:
        index: the samples; `batch.samples` are its rows.
        device: where the batches are.
        quarantine: files that cannot be used, as far as they have been met.

    Raises:
        UserError: a batch needs more samples than there are.
    """

    def __init__(
        self, index: Index, rows: range, *, batch: int, seed: int, device: torch.device, **loader: Any
    ) -> None:
        self._steps = steps_per_epoch(index, batch)
        self.index, self.quarantine, self.device = index, Quarantine(), device
        self._schedule = Schedule(build_order(index, batch=batch, seed=seed), RankSlice(batch, rows.start, rows.stop))
        self._make = partial(Loader, index, device=device, quarantine=self.quarantine, **loader)
        self._data: dict[str, Any] = {"batch": batch, "seed": seed, "images": index.counts}
        self._step = 0  # of the run, the next to be handed out
        self._pass: object | None = None  # the one that is under way
        self._running: _Running | None = None

    def __len__(self) -> int:
        """Batches of an epoch, the same on all ranks."""
        return self._steps

    def __iter__(self) -> Iterator[Batch]:
        """The batches of this rank, to the end of the epoch. Nothing begins before the first is asked for.

        Raises:
            UserError: so many files are bad that a batch cannot be filled.
            RuntimeError: the loader was moved meanwhile, by another `for`, `set_epoch` or `load_state_dict`.
        """
        if self._pass is not None:  # one before was left early
            self._step = -(-self._step // self._steps) * self._steps
        this = self._pass = object()
        end = (self.epoch + 1) * self._steps
        while self._step < end:
            yield self._next()
            if self._pass is not this:
                raise RuntimeError("the loader has moved since this batch: begin another `for`")
        self._pass = None

    def _next(self) -> Batch:
        """The batch of the step where the loader stands; it is made ahead if the step follows the one before."""
        if self._running is None or self._running.step != self._step:
            self.close()
            loader = self._make(schedule=replace(self._schedule, first_step=self._step))
            self._running = _Running(self._step, iter(loader), weakref.finalize(self, _finish, loader))
        try:
            batch = next(self._running.batches)
        except BaseException:
            self.close()
            raise
        self._step += 1
        self._running.step = self._step
        return batch.to(self.device)

    @property
    def epoch(self) -> int:
        """The epoch of the next batch."""
        return self._step // self._steps

    def set_epoch(self, epoch: int) -> None:
        """Have the next `for` go through this epoch: from its beginning, or on from a loaded state that is in it.

        Raises:
            UserError: the epoch is negative, or not a whole number.
        """
        _require("epoch", epoch, 0)
        if self._pass is not None or epoch != self.epoch:
            self._step, self._pass = epoch * self._steps, None

    @property
    def sampler(self) -> EpochLoader:
        """What frameworks call `set_epoch` of, as they do of a DataLoader's DistributedSampler."""
        return self

    def state_dict(self) -> dict[str, Any]:
        """Where the loader stands: the same on all ranks, whatever their number. What was made ahead does not count.

        Returns:
            Plain values. "position": images that all ranks together have received since the beginning of epoch 0.
        """
        return {"position": self._step * self._data["batch"], **self._data}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Have the next `for` go on where `state` was taken, on this or another number of ranks.

        Raises:
            UserError: the state is of another batch, seed or number of images, which have another order.
        """
        of = {key: state.get(key) for key in self._data}
        if of != self._data:
            raise UserError(f"the loader's state is of {of}, expected {self._data}: make the loader as it was made")
        position = state.get("position")
        step, rest = divmod(position, self._data["batch"]) if isinstance(position, Integral) else (-1, 0)
        if step < 0 or rest:
            raise UserError(f"the loader's state has position {position!r}, expected whole batches")
        self._step, self._pass = step, None

    def close(self) -> None:
        """Stop working ahead and free what it holds; the next `for` starts it again."""
        if self._running is not None:
            self._running.close()
            self._running = None

    def __enter__(self) -> EpochLoader:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


@dataclass
class _Running:
    """What makes the batches: the step of the next, and how to stop it."""

    step: int
    batches: Iterator[Batch]
    close: Callable[[], object]


def _finish(loader: Loader) -> None:
    """Stop a loader, when asked to, or at the end of the process, or when its owner is collected, by any thread."""
    if threading.current_thread() is threading.main_thread():
        loader.close()
    else:  # it may be one of the loader's own, which cannot wait for itself
        loader.stop()
