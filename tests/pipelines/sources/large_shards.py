"""Opens a synthetic index of ten million samples in a process of its own, and prints one line of JSON.

    python -m tests.pipelines.sources.large_shards --samples 10000000

The shards are sparse files: only their sizes and places are real.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path

import numpy as np
import psutil  # type: ignore[import-untyped]

from bench.rows import describe_machine
from pipelines.config import DataConfig
from pipelines.samples.order import build_order
from pipelines.sources import load_index
from pipelines.sources.shards.index_file import table_checksum

PER_SHARD = 8192
IMAGE_BYTES = 12_000
STRIDE = 13 * 1024  # header, image, header, description, in tar's blocks of 512 bytes


def write_index(root: Path, samples: int) -> None:
    """What `pack` would leave behind for images of equal size without labels."""
    (root / "index").mkdir()
    rows = np.arange(samples)
    tables: dict[str, np.ndarray] = {
        "offset": (rows % PER_SHARD * STRIDE + 512).astype(np.uint64),
        "size": np.full(samples, IMAGE_BYTES, np.uint32),
        "crc32": np.zeros(samples, np.uint32),
        "box_px": np.full((samples, 3), 112, np.float32),
    }
    for name, table in tables.items():
        np.save(root / f"index/{name}.npy", table)
    shards = []
    for number, first in enumerate(range(0, samples, PER_SHARD)):
        count = min(PER_SHARD, samples - first)
        file = root / f"shard-{number:06d}.tar"
        with file.open("wb") as out:
            out.truncate(count * STRIDE + 1024)
        shards.append({"file": file.name, "samples": count, "bytes": file.stat().st_size, "sha256": ""})
    content = {
        "format": 1, "name": "synthetic", "tables": sorted(tables), "shards": shards, "left_out": 0,
        "crc32": {name: table_checksum(root / f"index/{name}.npy") for name in tables},
    }  # fmt: skip
    (root / "index.json").write_text(json.dumps(content))


def main() -> None:
    """Write, open, shuffle, read; print the figures."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--samples", type=int, default=10_000_000)
    samples = parser.parse_args().samples
    memory = psutil.Process().memory_info
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        write_index(root, samples)
        on_disk = sum(file.stat().st_size for file in (root / "index").iterdir())
        build_order(load_index(DataConfig(source="shards", root=folder)), batch=2, seed=0)  # imports, not counted
        before = memory().rss
        start = time.perf_counter()
        index = load_index(DataConfig(source="shards", root=folder))
        opened_s = time.perf_counter() - start
        opened_bytes = memory().rss - before
        order = build_order(index, batch=2048, seed=0)
        first_batch = order.samples(0, np.arange(2048))
        shuffled_s = time.perf_counter() - start - opened_s
        start = time.perf_counter()
        for row in first_batch.tolist():
            assert len(index.read(row)) == IMAGE_BYTES
        read_s = time.perf_counter() - start
        in_memory = memory().rss - before
    row = {
        "bench": "index of shards",
        "machine": describe_machine(),
        "samples": samples,
        "shards": -(-samples // PER_SHARD),
        "open_s": round(opened_s, 2),
        "first_shuffle_s": round(shuffled_s, 2),
        "read_us_per_sample": round(read_s / len(first_batch) * 1e6, 1),
        "index_bytes_per_sample_on_disk": round(on_disk / samples, 1),
        "memory_bytes_per_sample_opened": round(opened_bytes / samples, 1),
        "memory_bytes_per_sample_after_first_batch": round(in_memory / samples, 1),
    }
    print(json.dumps(row))


if __name__ == "__main__":
    main()
