"""`bench-gpu`, without a GPU: what it runs, with which memory, and what it makes of the rows."""

from __future__ import annotations

import json
from pathlib import Path
from subprocess import CompletedProcess
from types import SimpleNamespace
from typing import Any

import pytest

from peclr_dali.bench.gpu.command import limited
from peclr_dali.bench.rows import read_rows
from tests.bench.test_documentation import step_row
from tests.command_line import run_cli

SHARE = "per_process_memory_fraction"


def test_torch_gets_its_part_of_the_smaller_card() -> None:
    assert limited(11e9, 80e9)["PYTORCH_ALLOC_CONF"] == f"{SHARE}:0.1031"  # 0.75 of 11 GB
    assert limited(24e9, 12e9)["PYTORCH_ALLOC_CONF"] == f"{SHARE}:1.0000"
    assert SHARE not in limited(None, 80e9).get("PYTORCH_ALLOC_CONF", "")


def test_both_commands_run_for_each_overlay_and_one_that_fails_stops_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls: list[tuple[str, list[str], str]] = []

    def run(line: list[str], *, env: dict[str, str], **options: Any) -> CompletedProcess[str]:
        command, words = line[2], line[3:]
        overlay = Path([word for word in words if word.endswith(".toml")][-1]).stem
        calls.append((command, words, overlay))
        assert (SHARE in env.get("PYTORCH_ALLOC_CONF", "")) == (overlay != "a100")
        loader = {"loaders": [{"images_per_s": 4000}], "verdict": "fast"}
        row = loader if command == "bench-loader" else step_row(1000, "Card")
        return CompletedProcess(line, 2 if (command, overlay) == ("bench-train", "rtx_24gb") else 0, json.dumps(row))

    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda device: SimpleNamespace(total_memory=80e9))
    monkeypatch.setattr("subprocess.run", run)
    assert run_cli("bench-gpu", "--set", "train.batch=256", "--out", str(tmp_path / "gpu")) == 1
    assert [(command, overlay) for command, _, overlay in calls] == [
        (command, overlay)
        for overlay in ("rtx_11gb", "rtx_24gb", "a100")
        for command in ("bench-train", "bench-loader")
    ]
    for command, words, _ in calls:
        assert [words[at + 1] for at, word in enumerate(words) if word == "--set"] == [
            "train.batch=256", "encoder.weights=random"
        ]  # fmt: skip
        assert words[-2:] == ["--record", str(tmp_path / "gpu" / f"{command.removeprefix('bench-')}.jsonl")]
    shown = capsys.readouterr()
    assert "bench-train failed with exit code 2" in shown.err
    assert "loader alone over step" in shown.out
    rows = read_rows(tmp_path / "gpu" / "gpu.jsonl")
    assert [(row["overlay"], row["loader_images_per_s"], row["verdict"]) for row in rows] == [
        ("rtx_11gb", 4000, "fast"), ("a100", 4000, "fast")
    ]  # fmt: skip


def test_what_was_measured_before_ctrl_c_is_in_the_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The measured commands write their own rows, each when it is done; bench-gpu one for each finished overlay."""

    def run(line: list[str], **options: Any) -> CompletedProcess[str]:
        if "rtx_24gb" in " ".join(line) and line[2] == "bench-loader":
            raise KeyboardInterrupt
        loader = {"loaders": [{"images_per_s": 4000}], "verdict": "fast"}
        return CompletedProcess(line, 0, json.dumps(loader if line[2] == "bench-loader" else step_row(1000, "Card")))

    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda device: SimpleNamespace(total_memory=80e9))
    monkeypatch.setattr("subprocess.run", run)
    assert run_cli("bench-gpu", "--out", str(tmp_path)) == 130
    assert [row["overlay"] for row in read_rows(tmp_path / "gpu.jsonl")] == ["rtx_11gb"]


def test_a_machine_without_a_gpu_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert run_cli("bench-gpu") == 2
    assert "torch finds no GPU: check nvidia-smi" in capsys.readouterr().err
