"""Opens a large index of shards in a process of its own, and prints one line of JSON.

    python -m tests.pipelines.sources.large_shards packed 10000000
    python -m tests.pipelines.sources.large_shards foreign 1000000

"packed" is what `pack` would leave behind; the shards are sparse files of which only sizes and places are real.
"foreign" indexes shards of webdataset's own writer: one is written, with 8192 images of 12 kB and 8192 descriptions,
and the others are further names of this file. So its pages are in memory, as those of shards that were just copied.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil  # type: ignore[import-untyped]
import webdataset  # type: ignore[import-untyped]

from peclr_dali.bench.rows import describe_machine
from peclr_dali.pipelines.config import DataConfig
from peclr_dali.pipelines.samples.order import build_order
from peclr_dali.pipelines.sources import load_index
from peclr_dali.pipelines.sources.shards.foreign import find_shards, index_shards
from peclr_dali.pipelines.sources.shards.index_file import IndexFile, Shard, write_index_file, write_tables

PER_SHARD = 8192
IMAGE_BYTES = 12_000
STRIDE = 13 * 1024  # header, image, header, description, in tar's blocks of 512 bytes
WORKERS = 2


def make_packed(root: Path, samples: int) -> dict[str, Any]:
    """An index of images of equal size without labels."""
    rows = np.arange(samples)
    tables: dict[str, np.ndarray] = {
        "offset": (rows % PER_SHARD * STRIDE + 512).astype(np.uint64),
        "size": np.full(samples, IMAGE_BYTES, np.uint32),
        "crc32": np.zeros(samples, np.uint32),
        "box_px": np.full((samples, 3), 112, np.float32),
    }
    shards = []
    for number, first in enumerate(range(0, samples, PER_SHARD)):
        count = min(PER_SHARD, samples - first)
        shards.append(Shard(f"shard-{number:06d}.tar", count, count * STRIDE + 1024, ""))
        with (root / shards[-1].file).open("wb") as out:
            out.truncate(shards[-1].bytes)
    write_index_file(root, IndexFile("synthetic", sorted(tables), shards, write_tables(root, tables)))
    return {"bench": "index of shards", "shards": len(shards)}


def make_foreign(root: Path, samples: int) -> dict[str, Any]:
    """Shards as webdataset writes them, with an extended header before each member; the time of indexing them."""
    (root / "in").mkdir()
    with webdataset.TarWriter(str(root / "in/000000.tar")) as tar:
        for number in range(PER_SHARD):
            tar.write({"__key__": f"{number:09d}", "jpg": bytes(IMAGE_BYTES), "json": {"label": number}})
    shards = -(-samples // PER_SHARD)
    for number in range(1, shards):
        (root / f"in/{number:06d}.tar").hardlink_to(root / "in/000000.tar")
    seconds = []
    for scanned in (shards, 0):
        start = time.perf_counter()
        found = index_shards(find_shards([f"{root}/in"]), root / "out", workers=WORKERS)
        seconds.append(round(time.perf_counter() - start, 2))
        assert found.scanned == scanned
    return {
        "bench": "index of foreign shards", "proof": "shards of another program are indexed", "shards": shards,
        "workers": WORKERS, "index_s": seconds[0], "index_again_s": seconds[1],
    }  # fmt: skip


def main(kind: str, samples: int) -> None:
    """Write, open, shuffle, read, name; print the figures."""
    memory = psutil.Process().memory_info
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        (root / "out").mkdir()
        row = make_packed(root / "out", samples) if kind == "packed" else make_foreign(root, samples)
        on_disk = sum(file.stat().st_size for file in (root / "out/index").iterdir())
        build_order(load_index(DataConfig(source="shards", root=f"{root}/out")), batch=2, seed=0)  # imports
        before, times = memory().rss, [time.perf_counter()]
        index = load_index(DataConfig(source="shards", root=f"{root}/out"))
        opened_bytes = memory().rss - before
        times.append(time.perf_counter())
        first_batch = build_order(index, batch=2048, seed=0).samples(0, np.arange(2048)).tolist()
        times.append(time.perf_counter())
        assert all(len(index.read(sample)) == IMAGE_BYTES for sample in first_batch)
        times.append(time.perf_counter())
        in_memory = memory().rss - before
        assert kind == "packed" or all(index.paths[sample].endswith(".jpg") for sample in first_batch)
        times.append(time.perf_counter())
        open_s, shuffle_s, read_s, name_s = np.diff(times).tolist()
        row |= {
            "machine": describe_machine(), "samples": len(index), "open_s": round(open_s, 2),
            "first_shuffle_s": round(shuffle_s, 2), "read_us_per_sample": round(read_s / 2048 * 1e6, 1),
            "name_us": round(name_s / 2048 * 1e6, 1), "index_bytes_per_sample_on_disk": round(on_disk / len(index), 1),
            "memory_bytes_per_sample_opened": round(opened_bytes / len(index), 1),
            "memory_bytes_per_sample_after_first_batch": round(in_memory / len(index), 1),
        }  # fmt: skip
    print(json.dumps(row))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
