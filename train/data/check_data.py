"""The `check-data` command: decodes every image once and lists those that cannot be used."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path

import torch

from peclr_dali.pipelines.config import DataConfig, PipelinesConfig, each_source
from peclr_dali.pipelines.files.check import check_image
from peclr_dali.pipelines.files.image_file import BadImage, ImageFile
from peclr_dali.pipelines.render.decoder_process import LIMIT_S, DaliDecoder, Decoder, DecoderProcess
from peclr_dali.pipelines.render.settings import Settings, choose_settings
from peclr_dali.pipelines.samples.bad_list import write_bad_list
from peclr_dali.pipelines.samples.index import Index
from peclr_dali.pipelines.samples.store import in_order
from peclr_dali.pipelines.sources import load_index
from peclr_dali.writing import refuse_existing


@dataclass(frozen=True)
class Checked:
    """Result of the check of one source.

    Attributes:
        key: the source's table in the configuration, "data" or "data.0".
        reasons: path -> reason why the file cannot be used.
        bad: number of samples of these files; an image with several hands is several samples.
    """

    key: str
    index: Index
    reasons: dict[str, str]
    bad: int
    list_file: Path


def check_data(
    data: DataConfig | tuple[DataConfig, ...],
    pipelines: PipelinesConfig,
    out: Path,
    *,
    device: torch.device,
    progress: Callable[[int, int], None],
    make_decoder: Callable[[Settings], Decoder] = DaliDecoder,
    limit_s: float = LIMIT_S,
) -> list[Checked]:
    """Decode every image of a configuration's sources, whole, with the decoder that a run uses.

    The decoder runs in a separate process, see `DecoderProcess`: an image that kills it is listed like others.

    Args:
        data: one or several sources. Several get a list each: `out` with a number before its ending.
        progress: called with (images done, images in all).
        make_decoder: makes the decoder, in its process.
        limit_s: seconds for a batch, plus one for each image.

    Raises:
        UserError: a list exists already, or the data cannot be read at all.
    """
    sources = each_source(data)
    lists = {"data": out}  # key: table of the configuration
    if len(sources) > 1:
        lists = {f"data.{number}": out.with_suffix(f".{number}{out.suffix}") for number in range(len(sources))}
    refuse_existing(lists.values())  # before the work, which may take hours
    # All files: without an earlier list of bad files, and with all labels.
    indices = [load_index(replace(one, bad_list=None, label_fraction=1.0), verify=True) for one in sources]
    total, done, checked = sum(map(len, indices)), 0, []

    def advance(here: int) -> None:
        progress(done + here, total)

    for (name, file), index in zip(lists.items(), indices, strict=True):
        settings = choose_settings(index, pipelines, device, rows=len(index))
        with closing(DecoderProcess(partial(make_decoder, settings), limit_s=limit_s)) as decoder:
            reasons = _bad_files(index, settings, decoder, advance)
        of_paths = {index.paths[row]: reason for row, reason in sorted(reasons.items())}
        write_bad_list(file, of_paths, checked=len(index))
        checked.append(Checked(name, index, of_paths, len(reasons), file))
        done += len(index)
    return checked


def _bad_files(
    index: Index, settings: Settings, decoder: DecoderProcess, progress: Callable[[int], None]
) -> dict[int, str]:
    """Row -> reason for each sample whose file cannot be used."""
    reasons: dict[int, str] = {}
    done = 0
    for found, samples, files in _read_ahead(index, settings):
        undecodable = decoder.faults(files) if files else {}
        reasons |= found | {samples[place]: reason for place, reason in undecodable.items()}
        done += len(found) + len(samples)
        progress(done)
    return reasons


_Read = tuple[dict[int, str], list[int], list[ImageFile]]
"""Samples that were read: row -> reason for those that must not reach the decoder; rows and files of the others."""


def _read_ahead(index: Index, settings: Settings) -> Iterator[_Read]:
    """Read all samples in batches; as many batches at once as the decoder has threads."""
    steps = in_order(len(index), settings.chunk_size)
    batches = (rows.tolist() for rows in steps)
    prefetch = index.prefetch(lambda: iter(steps))
    with ThreadPoolExecutor(settings.threads, thread_name_prefix="read") as pool:
        reading = deque(pool.submit(_read, index, rows) for rows in islice(batches, settings.threads))
        try:
            while reading:
                read = reading.popleft().result()
                reading.extend(pool.submit(_read, index, rows) for rows in islice(batches, 1))
                prefetch.done()
                yield read
        finally:
            prefetch.close()
            pool.shutdown(cancel_futures=True)


def _read(index: Index, rows: Sequence[int]) -> _Read:
    reasons: dict[int, str] = {}
    samples, files = [], []
    for row in rows:
        try:
            file = check_image(index.read(row))
        except OSError as error:
            reasons[row] = error.strerror or str(error)
        except BadImage as error:
            reasons[row] = str(error)
        else:
            samples.append(row)
            files.append(file)
    return reasons, samples, files
