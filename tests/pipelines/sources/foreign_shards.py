"""Indexes a million samples in shards of webdataset's own writer, in a process of its own; prints one line of JSON.

    python -m tests.pipelines.sources.foreign_shards --shards 123

One shard is written, with 8192 images of 12 kB and 8192 descriptions; the others are further names of this file. So its
pages are in memory, as those of shards that were just copied.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path

import numpy as np
import psutil  # type: ignore[import-untyped]
import webdataset  # type: ignore[import-untyped]

from bench.rows import describe_machine
from pipelines.config import DataConfig
from pipelines.samples.order import build_order
from pipelines.sources import load_index
from pipelines.sources.shards.foreign import find_shards, index_shards

PER_SHARD = 8192
IMAGE_BYTES = 12_000
WORKERS = 2


def write_shards(root: Path, shards: int) -> None:
    """Shards as webdataset writes them: an extended header before each member."""
    with webdataset.TarWriter(str(root / "000000.tar")) as tar:
        for number in range(PER_SHARD):
            tar.write({"__key__": f"{number:09d}", "jpg": bytes(IMAGE_BYTES), "json": {"label": number}})
    for number in range(1, shards):
        (root / f"{number:06d}.tar").hardlink_to(root / "000000.tar")


def main() -> None:
    """Write, index, open, shuffle, read; print the figures."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--shards", type=int, default=123)
    shards = parser.parse_args().shards
    memory = psutil.Process().memory_info
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        (root / "shards").mkdir()
        write_shards(root / "shards", shards)
        pattern = f"{root}/shards/*.tar"
        index_shards(find_shards([pattern])[:1], root / "one", workers=1)
        config = DataConfig(source="shards", root=f"{root}/one")
        build_order(load_index(config), batch=2, seed=0)  # imports, not counted
        start = time.perf_counter()
        found = index_shards(find_shards([pattern]), root / "index", workers=WORKERS)
        indexed_s = time.perf_counter() - start
        start = time.perf_counter()
        again = index_shards(find_shards([pattern]), root / "index", workers=WORKERS)
        again_s = time.perf_counter() - start
        assert again.scanned == 0
        on_disk = sum(file.stat().st_size for file in (root / "index").rglob("*") if file.is_file())
        before, start = memory().rss, time.perf_counter()
        index = load_index(DataConfig(source="shards", root=f"{root}/index"))
        opened_s = time.perf_counter() - start
        order = build_order(index, batch=2048, seed=0)
        first_batch = order.samples(0, np.arange(2048)).tolist()
        start = time.perf_counter()
        for row in first_batch:
            assert len(index.read(row)) == IMAGE_BYTES
        read_s = time.perf_counter() - start
        in_memory = memory().rss - before
        start = time.perf_counter()
        for row in first_batch:
            assert index.paths[row].endswith(".jpg")
        named_s = time.perf_counter() - start
    row = {
        "bench": "index of foreign shards",
        "proof": "shards of another program are indexed",
        "machine": describe_machine(),
        "samples": found.samples,
        "shards": found.shards,
        "workers": WORKERS,
        "index_s": round(indexed_s, 2),
        "index_again_s": round(again_s, 2),
        "index_mb": round(on_disk / 1e6, 1),
        "open_s": round(opened_s, 2),
        "read_us_per_sample": round(read_s / len(first_batch) * 1e6, 1),
        "name_us": round(named_s / len(first_batch) * 1e6, 1),
        "memory_bytes_per_sample_after_first_batch": round(in_memory / found.samples, 1),
    }
    print(json.dumps(row))


if __name__ == "__main__":
    main()
