"""`make_loader`: the loader for a user's own training loop, from arguments of any kind."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeGuard

import torch

from peclr_dali.bounds import LARGEST_SEED
from peclr_dali.errors import UserError
from peclr_dali.pipelines.config import DataConfig, PipelinesConfig
from peclr_dali.pipelines.loader.epoch_loader import EpochLoader, whole_number
from peclr_dali.pipelines.randomness import MOST_VIEWS
from peclr_dali.pipelines.samples.index import Index
from peclr_dali.pipelines.samples.shares import micro_batch_share
from peclr_dali.pipelines.samples.validate import validate
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
) -> EpochLoader:
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
