"""The `check-data` command: decode everything once, and list what cannot be used."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from errors import UserError
from pipelines.bad_list import write_bad_list
from pipelines.config import DataConfig, PipelinesConfig, each_source
from pipelines.draws import ColourConfig, GeometryConfig
from pipelines.feed import Quarantine
from pipelines.index import Index
from pipelines.loader import Loader
from pipelines.order import EpochOrder, RankSlice
from pipelines.sources import load_index
from pipelines.sources.shards import verified

BATCH = 256
_TINY = GeometryConfig(side_px=8)


@dataclass(frozen=True)
class Checked:
    """What a check of one source found.

    Attributes:
        key: the table of the configuration, "data" or "data.0".
        index: the source.
        reasons: path -> why the file cannot be used.
        list_file: the list.
    """

    key: str
    index: Index
    reasons: dict[str, str]
    list_file: Path


def check_data(
    data: DataConfig | tuple[DataConfig, ...],
    pipelines: PipelinesConfig,
    out: Path,
    *,
    device: torch.device,
    progress: Callable[[int, int], None],
) -> list[Checked]:
    """Decode every image of a configuration's sources, whole, with the decoder that the run will use.

    Args:
        data: one source, or several, which get a list each: `out` with the number before its ending.
        pipelines: threads and backend of the decoder.
        out: the list of bad files.
        device: of the run.
        progress: called with (images done, images in all).

    Raises:
        UserError: a list is there already, or the data cannot be used at all.
    """
    sources = each_source(data)
    names = ["data"] if len(sources) == 1 else [f"data.{number}" for number in range(len(sources))]
    outs = [out] if len(sources) == 1 else [out.with_suffix(f".{number}{out.suffix}") for number in range(len(sources))]
    for file in outs:
        if file.exists():
            raise UserError(f"{file}: exists already, and nothing is overwritten. Name another file.")
        if not file.parent.is_dir():
            raise UserError(f"{file.parent}: no such folder. Make it first.")
        try:  # before hours of work
            file.touch()
            file.unlink()
        except OSError as error:
            raise UserError(f"{file}: cannot be written ({error.strerror}). Name a file that can.") from error
    # Everything: neither a list of before nor a share of the labels hides a file.
    indices = [load_index(dataclasses.replace(one, bad_list=None, label_fraction=1.0)) for one in sources]
    total, done, checked = sum(map(len, indices)), 0, []
    for name, index, file in zip(names, indices, outs, strict=True):
        reasons = _bad_files(index, pipelines, device, partial(_advance, progress, done, total))
        write_bad_list(file, reasons, checked=len(index))
        checked.append(Checked(name, index, reasons, file))
        done += len(index)
    return checked


def _advance(progress: Callable[[int, int], None], before: int, total: int, done: int) -> None:
    progress(before + done, total)


def _bad_files(
    index: Index, pipelines: PipelinesConfig, device: torch.device, progress: Callable[[int], None]
) -> dict[str, str]:
    """Path -> reason of what the loader cannot use, in the order of the index."""
    batch = min(BATCH, len(index))
    quarantine = Quarantine(quiet=True)
    with Loader(
        dataclasses.replace(index, store=verified(index.store)),
        EpochOrder(len(index), len(index), seed=0, shuffle=False),
        RankSlice(batch, 0, batch),
        dataclasses.replace(pipelines, decode="whole"),
        _TINY,
        ColourConfig(jitter="none"),
        seed=0,
        device=device,
        views=1,
        last_step=-(-len(index) // batch),  # the last batch begins the next round
        quarantine=quarantine,
    ) as loader:
        for number, made in enumerate(loader, start=1):
            progress(min(number * len(made), len(index)))
    return {index.paths[row]: reason for row, reason in sorted(quarantine.reasons.items())}
