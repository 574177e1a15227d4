"""Cores and storage, in closed form; and the page's tables, which are the rows'."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench.capacity import GFLOP_AT_224, GPUS, Costs, Gpu, costs_of_row, images_per_s, need
from bench.documentation import PAGES, write_tables
from errors import UserError

ROOT = Path(__file__).parents[2]
COSTS = Costs(read_s=1e-4, decode_s=2e-4, views_s=3e-4, hand_over_s=1e-4, bytes_per_image=2**20 / 100)


def test_two_views_halve_the_published_rate() -> None:
    assert images_per_s(1000, "ResNet-50", 224) == 500


def test_smaller_views_and_larger_models_scale_by_their_operations() -> None:
    assert images_per_s(1000, "ResNet-50", 112) == 2000
    ratio = GFLOP_AT_224["ResNet-152"] / GFLOP_AT_224["ResNet-50"]
    assert images_per_s(1000, "ResNet-152", 224) == pytest.approx(500 / ratio)


def test_needs_in_closed_form() -> None:
    found = need(COSTS, Gpu("card", 4, 1000, ""), "ResNet-50", 224)
    assert found.images_per_s == 2000
    assert found.cores_cpu == pytest.approx(2000 * (3e-4 + 4e-4 * (224 / 128) ** 2))
    assert found.cores_read == pytest.approx(0.2)
    assert found.storage_mib_per_s == pytest.approx(20)


def test_at_the_measured_side_the_costs_are_those_measured() -> None:
    assert COSTS.on_cpu_s(128) == pytest.approx(7e-4)


def test_costs_come_from_a_row() -> None:
    stages = {"read only": 0.1, "decode only": 0.2, "views only": 0.3, "hand-over only": 0.1}
    row = {
        "stages": [{"name": name, "cpu_ms_per_image": ms} for name, ms in stages.items()],
        "page_cache": {"bytes_per_image": COSTS.bytes_per_image},
    }
    assert costs_of_row(row) == COSTS


def test_every_rate_says_where_it_is_from() -> None:
    assert all(gpu.source.startswith(("published: ", "assumed: ")) for gpu in GPUS)


def test_tables_are_those_of_the_last_rows(tmp_path: Path) -> None:
    page = "before\n<!-- rows: soak -->\nold\n<!-- end rows -->\nafter\n"
    assert "No row yet." in write_tables(page, tmp_path)
    machine = {"cpu": "CPU", "gpu": "none", "cores": 2, "date": "2030-01-01", "commit": "abc"}
    row = {
        "bench": "soak", "machine": machine, "settings": {"cores": 2}, "seconds": 3600, "images": 7,
        "memory_growth": 0.001, "history": [[0, 100, 6], [3600, 123, 6]],
    }  # fmt: skip
    (tmp_path / "soak.jsonl").write_text(json.dumps(row) + "\n" + json.dumps(row | {"images": 8}) + "\n")
    made = write_tables(page, tmp_path)
    assert made.startswith("before\n<!-- rows: soak -->\n")
    assert made.endswith("<!-- end rows -->\nafter\n")
    assert "`soak.jsonl`, row 2" in made
    assert "60 minutes, 8 images, memory +0.10%" in made
    assert write_tables(made, tmp_path) == made


def test_claims_of_a_gpu_are_those_of_each_stages_last_true_run(tmp_path: Path) -> None:
    page = "<!-- rows: gpu -->\n<!-- end rows -->\n"
    machine = {"cpu": "CPU", "gpu": "Card", "cores": 2, "date": "2030-01-01", "commit": "abc"}

    def row(stage: str, found: str, holds: bool | None, *, dry_run: bool = False) -> str:
        claim = {"what": "figure", "found": found, "wanted": "at least 2 x", "holds": holds}
        return json.dumps({"stage": stage, "dry_run": dry_run, "machine": machine, "claims": [claim]}) + "\n"

    file = tmp_path / "gpu.jsonl"
    file.write_text(row("loader", "9 x", True, dry_run=True))
    assert "none of this has been measured" in write_tables(page, tmp_path)
    file.write_text(
        row("loader", "1 x", False) + row("run", "3 s", None) + row("loader", "2 x", True)
        + row("loader", "9 x", True, dry_run=True)
    )  # fmt: skip
    made = write_tables(page, tmp_path)
    assert "| loader | figure | 2 x | at least 2 x | yes | `gpu.jsonl`, row 3 |" in made
    assert "| run | figure | 3 s | at least 2 x |  | `gpu.jsonl`, row 2 |" in made
    assert "1 x" not in made
    assert "9 x" not in made
    assert made.count("2 cores of an CPU, Card, 2030-01-01") == 1


def test_tables_of_a_cpu_stay_those_of_a_cpu(tmp_path: Path) -> None:
    machine = {"cpu": "CPU", "gpu": "none", "cores": 2, "date": "2030-01-01", "commit": "abc"}
    entry: dict[str, Any] = {"name": "this loader", "images_per_s": 1234, "interval": [1, 2], "cpu_ms_per_image": 1}
    rows: list[dict[str, Any]] = [
        {"machine": {**machine, "gpu": gpu}, "sources": "small", "loaders": [{**entry, "images_per_s": rate}]}
        for gpu, rate in (("none", 1234), ("Card", 9999))
    ]
    (tmp_path / "loader.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    made = write_tables("<!-- rows: loaders -->\n<!-- end rows -->\n", tmp_path)
    assert "1234" in made
    assert "9999" not in made


def test_unknown_table_is_told(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="known are loaders"):
        write_tables("<!-- rows: nothing -->\n<!-- end rows -->", tmp_path)


@pytest.mark.parametrize(("page", "tables"), [("performance.md", 6), ("cluster.md", 2), ("experiments.md", 1)])
def test_the_pages_hold_what_the_rows_say(page: str, tables: int) -> None:
    assert page in PAGES
    text = (ROOT / "docs" / page).read_text()
    assert text.count("<!-- rows: ") >= tables
    assert write_tables(text, ROOT / "bench" / "results") == text, "run 'python cli.py bench-docs'"
