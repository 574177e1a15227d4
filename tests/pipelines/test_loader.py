"""What the loader hands out: whole, in order, whatever lies on the disk."""

import dataclasses
import errno
import itertools
import os
import subprocess
import sys
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch
from nvidia.dali import Pipeline
from PIL import Image

from peclr_dali.errors import UserError
from peclr_dali.pipelines.batch import Batch, BatchMemory
from peclr_dali.pipelines.loader.prepare import SUBSTITUTE_ATTEMPTS, Quarantine
from peclr_dali.pipelines.samples.index import Bytes, Index, Store
from peclr_dali.pipelines.samples.order import EpochOrder, Order
from peclr_dali.pipelines.samples.partners import of_same_group
from peclr_dali.pipelines.views.augmentation import Augmentation, GeometryConfig
from tests.pipelines.harness import (
    RENDERERS,
    SMALL_PLAIN,
    RendererName,
    assert_equal,
    index_of,
    join_ranks,
    jpeg,
    load,
    loader_of,
    smooth_image,
    write_jpegs,
)
from tests.pipelines.image_files import ORIENTATION, encoded, exif_block, with_exif
from tests.pipelines.test_appearance import ALL


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Index:
    return write_jpegs(tmp_path_factory.mktemp("images"), 61)


@pytest.mark.parametrize("renderer", RENDERERS)
def test_batches_are_what_they_say(folder: Index, renderer: RendererName) -> None:
    made = load(folder, views=renderer)
    assert len(made) == 6
    for step, batch in enumerate(made):
        assert batch.positions.tolist() == list(range(20 * step, 20 * step + 20))
        for view in batch.views:
            assert view.image.shape == (20, 3, 16, 16)
            assert view.image.dtype == torch.uint8
            assert view.image.is_contiguous(memory_format=torch.channels_last)
            assert view.matrix.shape == view.source_to_view_px.shape == (20, 2, 3)
        assert not torch.equal(batch.views[0].matrix, batch.views[1].matrix)


@pytest.mark.parametrize("renderer", RENDERERS)
def test_a_sample_takes_its_mirror_along(folder: Index, renderer: RendererName) -> None:
    mirror = np.arange(len(folder)) % 3 == 0
    plain, mirrored = (
        load(index, views=renderer, chunk=7, last=4) for index in (folder, dataclasses.replace(folder, mirror=mirror))
    )
    for before, after in zip(plain, mirrored, strict=True):
        flips = torch.from_numpy(mirror)[after.samples[:, 0]]
        for one, other in zip(before.views, after.views, strict=True):
            assert torch.equal(one.matrix, other.matrix)
            assert torch.equal(torch.linalg.det(other.source_to_view_px[:, :, :2]) < 0, flips)
            assert torch.equal((one.image != other.image).flatten(1).any(dim=1), flips)


@pytest.mark.parametrize(("renderer", "pairs"), [("dali", False), ("cpu", False), ("cpu", True)])
def test_neither_chunks_nor_start_nor_ranks_change_a_sample(folder: Index, renderer: RendererName, pairs: bool) -> None:
    """With all augmentations, also in rows that hold pairs."""
    index = dataclasses.replace(folder, partners=of_same_group(np.arange(61) % 12)) if pairs else folder
    augmentation = Augmentation(GeometryConfig(side_px=16, crop_probability=0.5, flip_probability=0.5), appearance=ALL)

    def made(**options: Any) -> list[Batch]:
        return load(index, augmentation, views=renderer, **options)

    whole = made()
    assert (whole[0].samples[:, 0] != whole[0].samples[:, 1]).all() == pairs
    for chunk in (1, 7):
        assert_equal(made(chunk=chunk), whole)
    assert_equal(made(first=4), whole[4:])
    for edges in ([0, 8, 20], [0, 4, 15, 20]):
        assert_equal(join_ranks([made(rows=rows, chunk=5) for rows in itertools.pairwise(edges)]), whole)


ODD_BUT_GOOD = {
    "cmyk": encoded(Image.new("CMYK", (48, 40), (0, 255, 255, 0)), "JPEG", quality=95),
    "gray": encoded(Image.new("L", (48, 40), 100), "JPEG", quality=95),
    "deep": bytes(cv2.imencode(".png", np.full((40, 48, 3), 200 * 257, np.uint16))[1]),
    "exif": with_exif(
        encoded(Image.new("RGB", (60, 52), (0, 0, 255)), "JPEG", quality=95),
        exif_block((ORIENTATION, 3, 1, 6)),
        (60, 52),
    ),
}
"""Files that must be used: CMYK, gray, 16-bit PNG, on its side; flat, each in a colour to be recognised."""


def broken(kind: str, good: bytes) -> bytes:
    """A file that must be replaced; "scan" passes every check of its structure and fails to decode."""
    at = good.index(b"\xff\xc0") + 5
    return {
        "truncated": good[: len(good) // 2],
        "garbage": np.random.default_rng(0).bytes(2000),
        "empty": b"",
        "html": b"<!DOCTYPE html><html><body>404</body></html>",
        "huge": good[:at] + (65000).to_bytes(2, "big") * 2 + good[at + 4 :],
        "scan": UNDECODABLE,
    }[kind]


def with_bogus_table(good: bytes) -> bytes:
    """A JPEG with a sound structure whose Huffman table codes nothing that can be read."""
    at = good.index(b"\xff\xc4") + 5
    return good[:at] + bytes([255] * 16) + good[at + 16 :]


UNDECODABLE = with_bogus_table(jpeg(smooth_image(np.random.default_rng(1), 64, 64, 2)))


COLOURS = {"cmyk": (255, 0, 0), "gray": (100, 100, 100), "deep": (200, 200, 200), "exif": (0, 0, 255)}
"""Of the files of `ODD_BUT_GOOD`."""


def write_mixture(root: Path, *, plain: int, others: int) -> tuple[Index, set[str]]:
    """A folder of plain files, with odd and broken ones among them, as many of each; and the names of the broken."""
    rng = np.random.default_rng(0)
    pictures = [jpeg(smooth_image(rng, 40, 48, 3)) for _ in range(20)]
    for number in range(plain):
        (root / f"plain_{number}.jpg").write_bytes(pictures[number % 20])
    bad_names = set()
    for number in range(others):
        kind = [*COLOURS][number % 4]
        (root / f"{kind}_{number}.jpg").write_bytes(ODD_BUT_GOOD[kind])
        kind = ("truncated", "garbage", "empty", "html", "huge", "scan")[number % 6]
        bad_names.add(f"{kind}_{number}.jpg")
        (root / f"{kind}_{number}.jpg").write_bytes(broken(kind, pictures[number % 20]))
    return index_of(root), bad_names


def assert_replaced(
    index: Index, order: Order, made: list[Batch], bad_names: set[str], caplog: pytest.LogCaptureFixture
) -> None:
    """Each bad file was logged once and is replaced by its first usable substitute; no other sample is changed."""
    named = [Path(str(record.args[0])).name for record in caplog.records if isinstance(record.args, tuple)]
    assert sorted(named) == sorted(bad_names)
    samples = torch.cat([batch.samples[:, 0] for batch in made]).reshape(-1, order.length).tolist()
    assert len(samples) == 2
    for epoch, used in enumerate(samples):
        for place, wanted in enumerate(order.samples(epoch, np.arange(order.length)).tolist()):
            tried = [wanted, *order.substitutes(epoch, place, SUBSTITUTE_ATTEMPTS).tolist()]
            assert used[place] == next(sample for sample in tried if index.paths[sample] not in bad_names)


@pytest.mark.parametrize("renderer", RENDERERS)
def test_odd_files_among_good_ones(renderer: RendererName, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """200 odd files among 1000 good: bad ones are named once and replaced, odd ones used, nothing else changes."""
    index, bad_names = write_mixture(tmp_path, plain=1000, others=100)
    assert len(index) == 1200

    order, quarantine = EpochOrder(1200, 1200, seed=0), Quarantine()
    made = load(
        index, SMALL_PLAIN, batch=240, order=order, last=10, chunk=48, views=renderer, quarantine=quarantine
    )  # fmt: skip
    assert {index.paths[sample] for sample in quarantine.reasons} == bad_names
    assert_replaced(index, order, made, bad_names, caplog)

    seen = dict.fromkeys(COLOURS, 0)
    for batch in made[:5]:
        for row, sample in enumerate(batch.samples[:, 0].tolist()):
            kind = index.paths[sample].split("_")[0]
            if kind in COLOURS:
                seen[kind] += 1
                center = batch.views[0].image[row, :, 7:9, 7:9].flatten(1).float().mean(dim=1)
                np.testing.assert_allclose(center, COLOURS[kind], atol=6)
                if kind == "exif":
                    size_px = 1 / batch.views[0].source_to_view_px[row, :, :2].norm(dim=0) * 16
                    np.testing.assert_allclose(size_px * batch.views[0].matrix[row, :, :2].norm(dim=0), 60, atol=1e-2)
    assert all(count >= 25 for count in seen.values())


class Failing(Store):
    """Reads the files of an index, but one fails with an error of the system."""

    def __init__(self, index: Index, number: int) -> None:
        self.index, self.number = dataclasses.replace(index, store=None), number

    def read(self, rows: Sequence[int]) -> list[Bytes]:
        read = dict(zip(rows, self.index.read_many(rows), strict=True))
        return [OSError(self.number, os.strerror(self.number)) if row == 7 else read[row] for row in rows]


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EIO, errno.ESTALE])
def test_an_error_of_the_machine_ends_the_run_and_makes_no_file_bad(
    folder: Index, number: int, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(UserError, match=rf"/007\.jpg: {os.strerror(number)}\. This may be an error of the machine"):
        load(dataclasses.replace(folder, store=Failing(folder, number)))
    assert "cannot be used" not in caplog.text


@pytest.mark.parametrize("number", [errno.ENOENT, errno.EACCES, errno.ELOOP, errno.ENAMETOOLONG])
def test_an_error_of_a_file_makes_it_bad(folder: Index, number: int, caplog: pytest.LogCaptureFixture) -> None:
    assert len(load(dataclasses.replace(folder, store=Failing(folder, number)))) == 6
    assert f"007.jpg cannot be used ({os.strerror(number)})" in caplog.text


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("Error in operator:\nstd::bad_alloc", "std::bad_alloc"),
        ("cudaErrorUnknown", r"DALI does not decode a sound image either \(cudaErrorUnknown\)"),
    ],
)
@pytest.mark.parametrize("renderer", RENDERERS)
def test_a_decoder_that_fails_on_every_image_ends_the_run_and_makes_no_file_bad(
    folder: Index, renderer: RendererName, message: str, expected: str, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    calls, real = itertools.count(), Pipeline.outputs

    def outputs(pipeline: Pipeline, stream: object = None) -> object:
        if next(calls) >= 2:
            raise RuntimeError(message)
        return real(pipeline, stream)

    monkeypatch.setattr(Pipeline, "outputs", outputs)
    with pytest.raises((UserError, RuntimeError), match=expected):
        load(folder, views=renderer)
    assert "cannot be used" not in caplog.text


LITTLE_MEMORY = """
import resource
import cv2
import numpy as np
import psutil
from peclr_dali.errors import UserError
from peclr_dali.pipelines.files.check import check_image
from peclr_dali.pipelines.views.plan import Chunk
from peclr_dali.pipelines.render.runner import FileDecoder
from tests.pipelines.harness import settings_of

def chunk(side_px):
    image = np.zeros((side_px, side_px, 3), np.uint8)
    return Chunk(np.arange(1), files=[check_image(cv2.imencode(".jpg", image)[1])])

decoder = FileDecoder(settings_of(1))
small, large = chunk(64), chunk(9000)  # the large one takes 243 MB, twice while it is copied
assert decoder.decodes(small)
for mib in (100, 200, 260, 300, 350):
    resource.setrlimit(resource.RLIMIT_AS, (psutil.Process().memory_info().vms + mib * 2**20, -1))
    try:
        print(decoder.decodes(large))
    except (UserError, RuntimeError) as error:
        print(" ".join(str(error).split()))
    except MemoryError:  # one line of the command, as any lack of memory
        print("no memory")
assert decoder.decodes(small)
"""


@pytest.mark.slow
def test_lack_of_memory_is_no_fault_of_a_file() -> None:
    """Not even where DALI's message does not speak of memory, and a small image still decodes."""
    run = subprocess.run([sys.executable, "-c", LITTLE_MEMORY], capture_output=True, text=True, check=True)
    lines = run.stdout.splitlines()
    assert "alloc" in lines[0]
    assert "False" not in lines


@pytest.mark.parametrize("renderer", RENDERERS)
@pytest.mark.parametrize("size", [(2, 2), (1, 4), (1, 300), (7, 3), (3000, 40)])
def test_extreme_sizes_are_read_within_their_memory(
    renderer: RendererName, size: tuple[int, int], tmp_path: Path
) -> None:
    """A flat grey image fills its box with grey, whatever its size; around it lies the fill."""
    cv2.imwrite(str(tmp_path / "flat.png"), np.full((*size, 3), 200, np.uint8))
    for batch in load(index_of(tmp_path), SMALL_PLAIN, batch=1, last=3, views=renderer):
        for view in batch.views:
            matrix = view.source_to_view_px[0].double().numpy()
            x, y = matrix[:, :2] @ np.array([size[1] / 2, size[0] / 2]) + matrix[:, 2]
            thickness_px = min(size) * np.sqrt(abs(np.linalg.det(matrix[:, :2])))
            if thickness_px > 3:  # else the sampling may miss it
                assert view.image[0, 0, int(y), int(x)] > 150  # beside its one row lies the fill
            assert view.image.max() <= 200


@pytest.mark.parametrize("renderer", RENDERERS)
def test_a_restart_gives_the_same_bits_where_regions_do_not_decode(renderer: RendererName, tmp_path: Path) -> None:
    """Whether or not the process has met the file before."""
    rng = np.random.default_rng(0)
    for number in range(16):
        data = jpeg(smooth_image(rng, 600, 500, 2))
        if number % 5 == 0:
            data = with_bogus_table(data)
        (tmp_path / f"{number:02}.jpg").write_bytes(data)
    heights = np.linspace(100, 500, 16)[rng.permutation(16)]
    box_px = np.column_stack([np.full(16, 250), heights, np.full(16, 100)]).astype(np.float32)
    index = dataclasses.replace(index_of(tmp_path), box_px=box_px)

    def made(first: int) -> list[Batch]:
        options = {"views": renderer, "chunk": 4, "threads": 1, "decode": "region"}
        return load(index, Augmentation(GeometryConfig(side_px=48)), batch=8, first=first, last=8, **options)

    through = made(0)
    assert {row for batch in through for row in batch.bad.tolist()} == {0, 5, 10, 15}
    assert all(row % 5 for batch in through for row in batch.samples[:, 0].tolist())
    for first in (2, 5):
        assert_equal(made(first), through[first:])


def test_a_closed_loader_raises_an_error(folder: Index) -> None:
    loader = loader_of(folder, last=None)
    iteration = iter(loader)
    next(iteration)
    loader.close()
    assert loader._ahead._thread is not None
    assert not loader._ahead._thread.is_alive()
    with pytest.raises(RuntimeError, match="the loader is closed"):
        next(iteration)
    never = loader_of(folder)
    never.close()
    with pytest.raises(RuntimeError, match="the loader is closed"):
        next(iter(never))


def test_the_files_of_a_chunk_are_freed_when_the_next_one_is_there(folder: Index) -> None:
    with loader_of(folder, last=None) as loader:
        yielded = [weakref.ref(chunk.files[0].encoded) for chunk, _ in itertools.islice(loader.decoded(), 20)]
        assert sum(reference() is not None for reference in yielded) <= 2


def test_a_buffer_is_reused_only_when_nothing_refers_to_it() -> None:
    memory = BatchMemory(4, [8], torch.device("cpu"), torch.device("cpu"))
    first = memory.batch(np.arange(4)).views[0].image
    address = first.data_ptr()
    first.fill_(7)
    view = first[1:3]
    del first
    other = memory.batch(np.arange(4)).views[0].image
    other.fill_(9)
    assert other.data_ptr() != address  # a view of the first one is still in use
    assert (view == 7).all()
    del view
    assert memory.batch(np.arange(4)).views[0].image.data_ptr() == address
    del memory
    assert (other == 9).all()
