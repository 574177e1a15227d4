"""The commands that measure, without measuring: exit codes, and what is told before anything is measured."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from bench import rows
from bench.loaders.compare import compare_loaders
from bench.loaders.first_batch import first_batch
from bench.loaders.ours import CPU, LoaderSettings, require_sound
from errors import UserError
from pipelines.config import DataConfig
from pipelines.sources import load_index
from pipelines.sources.shards.pack import pack
from tests.command_line import run_cli
from tests.train.tiny_run import write_images
from train.config.pretraining import Config


@pytest.fixture
def images(tmp_path: Path) -> Path:
    write_images(tmp_path / "images", count=48)
    return tmp_path / "images"


def of(folder: Path, source: str = "folder") -> list[str]:
    return ["--batch", "16", "--set", f"data.source={source}", "--set", f"data.root={folder}"]


def _give(given: Any, *arguments: Any) -> Any:
    return given


def never(*arguments: Any, **options: Any) -> None:
    pytest.fail("begins to measure")


@pytest.mark.parametrize(("steady", "code"), [(True, 0), (False, 1)])
def test_a_soak_that_grows_fails(steady: bool, code: int, images: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row = {"steady": steady, "seconds": 60, "images": 1, "memory_growth": 0, "settled": (30, 1, 1), "end": (60, 1, 1)}
    monkeypatch.setattr("bench.loaders.soak.soak", lambda *arguments: row)
    assert run_cli("bench-loader", *of(images), "--soak", "1") == code


@pytest.mark.parametrize(("slower", "code"), [(None, 0), ("slower than the row", 1)])
def test_a_loader_that_got_slower_fails(
    slower: str | None, code: int, images: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    row = {"verdict": "As it was."}
    monkeypatch.setattr("bench.loaders.compare.compare_loaders", lambda *arguments, **options: row)
    answers: dict[str, Any] = {"find_row": row, "require_comparable": None, "as_tables": [], "regression": slower}
    for name, given in answers.items():
        monkeypatch.setattr(f"bench.loaders.report.{name}", partial(_give, given))
    assert run_cli("bench-loader", *of(images), "--compare", "rows.jsonl") == code
    assert capsys.readouterr().err == ("" if slower is None else "error: slower than the row\n")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--record", "/proc/rows.jsonl"], "--record /proc/rows.jsonl: cannot be written"),
        (["--plot", "/proc/plot.png"], "--plot /proc/plot.png: cannot be written"),
        (["--plot", "plot.txt"], "--plot plot.txt: expected a name that ends in .png"),
        (["--tune", "--soak", "1"], "--tune and --soak exclude each other"),
        (["--soak", "1", "--compare", "rows.jsonl"], "--compare: not used by --soak"),
        (["--tune", "--json", "--repeats", "3"], "--repeats, --json: not used by --tune"),
        (["--tune", "--record", "rows.jsonl"], "--record: not used by --tune"),
        (["--first-batch", "--no-peers", "--seconds", "1"], "--seconds, --peers: not used by --first-batch"),
        (["--large", "--pixels", "shards"], "--large makes other images than those of --pixels"),
    ],
)
def test_unwritable_files_and_excluding_options_are_reported_first(
    arguments: list[str], told: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("compare.compare_loaders", "tune.tune", "soak.soak"):
        monkeypatch.setattr(f"bench.loaders.{name}", never)
    assert run_cli("bench-loader", *arguments) == 2
    error = capsys.readouterr().err
    assert told in error
    assert error.count("\n") == 1


def test_checking_whether_a_file_can_be_written_leaves_no_file(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def measured(*arguments: Any, **options: Any) -> None:
        raise UserError("all was looked at")

    monkeypatch.setattr("bench.loaders.compare.compare_loaders", measured)
    kept = tmp_path / "kept.jsonl"
    kept.write_text("{}\n")
    assert run_cli("bench-loader", *of(images), "--record", str(kept), "--plot", str(tmp_path / "plot.png")) == 2
    assert "all was looked at" in capsys.readouterr().err
    assert kept.read_text() == "{}\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["images", "kept.jsonl"]


def test_a_row_of_other_work_is_refused_before_anything_is_measured(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("bench.loaders.compare.compare_loaders", never)
    row = {"bench": "loader", "machine": {"cpu": "other", "gpu": "none"}, "settings": {"cores": 1, "batch": 8}}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row | {"config": {}, "loaders": []}) + "\n")
    assert run_cli("bench-loader", *of(images), "--compare", str(tmp_path / "rows.jsonl")) == 2
    assert "the row was measured with cpu = 'other'" in capsys.readouterr().err


def test_a_row_that_cannot_be_written_is_not_lost() -> None:
    with pytest.raises(UserError, match=r'/dev/full: cannot be written .* \{"figure": 7\}'):
        rows.append(Path("/dev/full"), {"figure": 7})


def test_bad_files_are_reported_before_anything_is_measured(images: Path) -> None:
    index = load_index(DataConfig(source="folder", root=str(images)))
    require_sound(index)
    (images / "03.jpg").write_bytes(b"no image")
    (images / "07.jpg").unlink()
    with pytest.raises(UserError, match=r"2 of 48 images cannot be used, the first being .*03\.jpg .*data\.bad_list="):
        require_sound(index)


def test_packed_data_is_measured(images: Path, tmp_path: Path) -> None:
    source = DataConfig(source="folder", root=str(images), box_margin=1.0)
    pack(load_index(source), tmp_path / "shards", per_shard=20, workers=1)
    config = Config(data=DataConfig(source="shards", root=str(tmp_path / "shards")))
    settings = LoaderSettings(cores=1, batch=16, repeats=2, repeat_s=0.05, warmup_s=0.05)
    found = compare_loaders(config, settings, device=CPU)
    assert [entry["name"] for entry in found["loaders"]] == ["this loader"]
    assert found["loaders"][0]["images_per_s"] > 0
    assert found["page_cache"] is None
    assert first_batch(config, settings)["images"] == 48
