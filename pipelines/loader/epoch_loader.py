"""`make_loader`, and the `EpochLoader` that it makes: an epoch of batches in each `for`, for a user's own loop."""

import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Integral
from pathlib import Path
from typing import Any, NoReturn, TypeGuard

import torch

from peclr_dali.bounds import LARGEST_COUNT, LARGEST_SEED
from peclr_dali.errors import UserError
from peclr_dali.pipelines.batch import Batch
from peclr_dali.pipelines.config import DataConfig, PipelinesConfig
from peclr_dali.pipelines.loader.loader import Loader, build_loader
from peclr_dali.pipelines.loader.prepare import Quarantine
from peclr_dali.pipelines.randomness import MOST_VIEWS
from peclr_dali.pipelines.samples.index import Index
from peclr_dali.pipelines.samples.order import Schedule, build_order, steps_per_epoch
from peclr_dali.pipelines.samples.rules import validate
from peclr_dali.pipelines.samples.shares import micro_batch_share
from peclr_dali.pipelines.sources import load_index
from peclr_dali.pipelines.views.augmentation import AppearanceConfig, Augmentation, ColourConfig, GeometryConfig
from peclr_dali.ranks import described_ranks


def make_loader(
    data: str | Path | Index | DataConfig | Sequence[DataConfig],
    *,
    batch: int,
    seed: int = 0,
    device: torch.device | str | None = None,
    rank: int | None = None,
    world_size: int | None = None,
    micro_batch: int = 1,
    views: int | None = None,
    geometry: GeometryConfig | Sequence[GeometryConfig] = GeometryConfig(),  # noqa: B008  frozen
    colour: ColourConfig | Sequence[ColourConfig] = ColourConfig(),  # noqa: B008
    appearance: AppearanceConfig | Sequence[AppearanceConfig] = AppearanceConfig(),  # noqa: B008
    config: PipelinesConfig = PipelinesConfig(),  # noqa: B008
) -> "EpochLoader":
    """Make a loader of augmented views with their matrices, for any training loop. Examples: docs/library.md.

    Args:
        data: a folder with images at any depth, the configuration of one or several datasets, or an index.
        batch: images in a step, over all ranks. A rank gets an even share of consecutive rows; where the ranks do not
            divide the batch, the first ranks get one more.
        seed: seed of the order and of all draws.
        device: device of the batches. None: the GPU that `LOCAL_RANK` numbers (the first GPU if that is not set), or
            the CPU if torch sees no GPU.
        rank: rank of this process. None: from torchrun's environment variables.
        world_size: number of processes that share each batch. None: from torchrun's environment variables.
        micro_batch: a rank gets whole micro-batches of so many images, as its `ExactStep` takes them. If the
            micro-batches are no multiple of the number of ranks, the first ranks get one more.
        views: number of views of each image, at most 256. None: as many as a list below has entries, or 2.
        geometry: ranges of the random affine maps, and the size of the views; for all views, or a list with one for
            each view. `fill` must be the same for all.
        colour: ranges of the colour jitter; for all views, or a list.
        appearance: further augmentations of pixels; for all views, or a list.
        config: how the views are made. Where torchrun does not say how many processes share this machine's cores, set
            `threads` if there are several.

    Raises:
        UserError: the data cannot be used, a batch needs more images or fewer ranks, it is not whole micro-batches, the
            ranks do not fit, a number is out of bounds, or torch cannot use the device.
    """
    batch, micro_batch = whole_number("batch", batch, 1), whole_number("micro_batch", micro_batch, 1)
    augmentations = _augmentations(views, geometry=geometry, colour=colour, appearance=appearance)
    seed = whole_number("seed", seed, 0, LARGEST_SEED)
    if rank is not None and world_size is not None:
        rank, world_size = whole_number("rank", rank, 0), whole_number("world_size", world_size, 1)
    ranks = described_ranks(rank, world_size)
    share = micro_batch_share(batch, micro_batch, ranks.rank, ranks.world_size, table="")
    if device is None:
        device = f"cuda:{ranks.local_rank}" if torch.cuda.is_available() else "cpu"
    if not isinstance(config, PipelinesConfig):
        raise UserError(f"config = {config!r}: expected a PipelinesConfig")
    if isinstance(data, str | Path) and data != "":
        data = DataConfig(source="folder", root=str(data))
    if isinstance(data, Index):
        index = data
        validate(index)
    elif isinstance(data, DataConfig) or (data and _are_configs(data)):
        index = load_index(data)
    else:
        raise UserError(f"data = {data!r}: expected a folder, an Index, or at least one dataset's DataConfig")
    return EpochLoader(
        index,
        share,
        batch=batch,
        seed=seed,
        config=config,
        augmentations=augmentations,
        device=_usable(device),
        processes_here=ranks.local_world_size,
    )


def _are_configs(data: Any) -> TypeGuard[Sequence[DataConfig]]:
    return isinstance(data, Sequence) and all(isinstance(source, DataConfig) for source in data)


def _augmentations(views: int | None, **tables: Any) -> list[Augmentation]:
    """The augmentation of each view, from tables for all views or lists of tables."""
    counts = {name: len(table) for name, table in tables.items() if isinstance(table, Sequence)}
    if views is not None or not counts:
        counts["views"] = 2 if views is None else views
    for name, count in counts.items():
        whole_number("views" if name == "views" else f"the length of {name}", count, 1, MOST_VIEWS)
    if len(set(counts.values())) > 1:
        raise UserError(f"the numbers of views differ: {counts}. Give each list one entry for each view")
    count = int(max(counts.values()))
    columns = [table if name in counts else [table] * count for name, table in tables.items()]
    augmentations = [Augmentation(**dict(zip(tables, row, strict=True))) for row in zip(*columns, strict=True)]
    fills = dict.fromkeys(repr(augmentation.geometry.fill) for augmentation in augmentations)
    if len(fills) > 1:  # halving reads beyond the border
        raise UserError(f"geometry.fill differs between views: {', '.join(fills)}. Give all views the same")
    return augmentations


def _usable(device: torch.device | str) -> torch.device:
    """The device; a GPU gets its number. A device that torch does not know or see is a `UserError`."""
    try:
        place = torch.device(device)
    except (RuntimeError, TypeError):
        place = torch.device("meta")
    gpus = torch.cuda.device_count()
    if place.type != "cpu" and not (place.type == "cuda" and (place.index or 0) < gpus):
        raise UserError(
            f"device = {str(device)!r}: torch sees {gpus} GPUs; expected 'cpu', 'cuda', or 'cuda:N' with a GPU's number"
        )
    return torch.device("cuda", torch.cuda.current_device()) if place == torch.device("cuda") else place


def whole_number(name: str, number: Any, least: int, largest: int = LARGEST_COUNT) -> int:
    """The number as Python's: NumPy's would overflow, and be rounded beside others.

    Raises:
        UserError: it is no whole number from `least` to `largest`.
    """
    if isinstance(number, bool) or not isinstance(number, Integral) or not least <= int(number) <= largest:
        raise UserError(f"{name} = {number!r}: expected a whole number from {least} to {largest}")
    return int(number)


class EpochLoader:
    """Yields one epoch of batches in each `for` loop. `make_loader` makes it.

    A `for` loop yields the current epoch: all of it, or its rest after `load_state_dict`. If a loop is left early, the
    next loop begins the next epoch. Batches are prepared ahead, also across epochs, until `close`, the end of a `with`
    block or the end of the process.

    Args:
        index: the samples.
        rows: the rows of each batch that this rank loads.
        batch: samples in a step, over all ranks.
        seed: seed of the order and of all draws.
        config: how views are made.
        augmentations: of each view.
        device: device of the batches.
        processes_here: processes that share this machine's cores.

    Attributes:
        index: the samples; `batch.samples` are its rows.
        device: device of the batches.
        quarantine: the files found so far that cannot be used.

    Raises:
        UserError: there are fewer samples than a batch.
    """

    def __init__(
        self,
        index: Index,
        rows: range,
        *,
        batch: int,
        seed: int,
        config: PipelinesConfig,
        augmentations: Sequence[Augmentation],
        device: torch.device,
        processes_here: int,
    ) -> None:
        self._steps = steps_per_epoch(index, batch, table="")
        self.index, self.quarantine, self.device = index, Quarantine(), device
        self._schedule = Schedule(build_order(index, batch=batch, seed=seed), batch, rows)
        self._config, self._augmentations, self._processes_here = config, augmentations, processes_here
        self._data: dict[str, Any] = {"batch": int(batch), "seed": int(seed), "images": index.counts}  # may be NumPy's
        self._step = 0  # of the run, the next to be handed out
        self._pass: object | None = None  # the one that is under way
        self._running: _Running | None = None

    def __len__(self) -> int:
        """Batches of an epoch, the same on all ranks."""
        return self._steps

    def __iter__(self) -> Iterator[Batch]:
        """Yield the batches of this rank to the end of the epoch. Loading begins when the first is requested.

        Raises:
            UserError: so many files are bad that a batch cannot be filled.
            RuntimeError: another `for`, `set_epoch` or `load_state_dict` has changed the position meanwhile, or this is
                a forked process.
        """
        if self._pass is not None:  # one before was left early
            self._step = -(-self._step // self._steps) * self._steps
        this = self._pass = object()
        end = (self.epoch + 1) * self._steps
        while self._step < end:
            batch = self._next()
            self._step += 1  # directly before the yield, so that Ctrl-C cannot come between the two
            yield batch
            del batch  # its memory may be used again
            if self._pass is not this:
                raise RuntimeError("the loader's position has changed since this batch: start another `for`")
        self._pass = None

    def _next(self) -> Batch:
        """The batch of the current step. It was prepared ahead if this step follows the previous one."""
        if self._running is None or self._running.step != self._step:
            self.close()
            loader = build_loader(
                self.index,
                replace(self._schedule, first_step=self._step),
                self._config,
                self._augmentations,
                device=self.device,
                processes_here=self._processes_here,
                quarantine=self.quarantine,
            )
            self._running = _Running(self._step, iter(loader), weakref.finalize(self, _finish, loader))
        try:
            batch = next(self._running.batches).to(self.device)
            self._running.step += 1
        except BaseException:
            self.close()
            raise
        return batch

    @property
    def epoch(self) -> int:
        """The epoch of the next batch."""
        return self._step // self._steps

    def set_epoch(self, epoch: int) -> None:
        """Let the next `for` yield this epoch: all of it, or the rest after a loaded state in this epoch.

        Raises:
            UserError: the epoch is negative, or not a whole number.
        """
        epoch = whole_number("epoch", epoch, 0)
        if self._pass is not None or epoch != self.epoch:
            self._step, self._pass = epoch * self._steps, None

    @property
    def sampler(self) -> "EpochLoader":
        """The object whose `set_epoch` frameworks call, as they do with a DataLoader's DistributedSampler."""
        return self

    def state_dict(self) -> dict[str, Any]:
        """The loader's position, the same on all ranks and for any number of ranks. Batches made ahead do not count.

        Returns:
            Plain values. "position": images that all ranks together have received since the beginning of epoch 0.
        """
        return {"position": self._step * self._data["batch"], **self._data}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next `for` continue at the position of `state`, also with another number of ranks.

        Raises:
            UserError: the state was saved with another batch, seed or number of images, so with another order; or it is
                no loader's state.
        """
        data = {key: state.get(key) for key in self._data} if isinstance(state, Mapping) else state
        if data != self._data:
            raise UserError(
                f"the loader's state is of {data!r}, expected {self._data}, as state_dict() gave it: give the loader "
                "the same arguments"
            )
        position = state.get("position")
        step, rest = divmod(position, self._data["batch"]) if isinstance(position, Integral) else (-1, 0)
        if not 0 <= step <= LARGEST_COUNT or rest:
            raise UserError(f"the loader's state has position {position!r}, expected a multiple of the batch")
        self._step, self._pass = step, None

    def close(self) -> None:
        """Stop preparing batches and free their memory. The next `for` starts again."""
        if self._running is not None:
            self._running.close()
            self._running = None

    def __enter__(self) -> "EpochLoader":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __reduce__(self) -> NoReturn:
        raise TypeError("a loader cannot be copied or sent to another process: call make_loader there")


@dataclass
class _Running:
    """A running loader: the step of its next batch, its batches, and the function that stops it."""

    step: int
    batches: Iterator[Batch]
    close: Callable[[], object]


def _finish(loader: Loader) -> None:
    """Stop a loader: in `close`, at the end of the process, or, in any thread, when its owner is garbage-collected."""
    if threading.current_thread() is threading.main_thread():
        loader.close()
    else:  # it may be one of the loader's own, which cannot wait for itself
        loader.stop()
