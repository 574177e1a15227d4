"""The command line: its help, and the configuration that it prints."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.command_line import run_cli
from train.config import Config, load_config

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        ([], "make-data"),
        (["--help"], "pretrain"),
        (["-h"], "pretrain"),
        (["pretrain", "--help"], "--print-config"),
        (["make-data", "--help"], "--poses"),
        (["views", "--help"], "--samples"),
        (["export", "--help"], "safetensors"),
        (["finetune", "--help"], "--from"),
        (["predict", "--help"], "--scale-m"),
        (["experiment", "--help"], "--record"),
    ],
)
def test_help_teaches(arguments: list[str], shown: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli(*arguments) == 0
    captured = capsys.readouterr()
    assert "Usage:" in captured.out
    assert shown in captured.out
    assert not captured.err


HEAVY = ("torch", "torchvision", "nvidia", "numba", "cv2", "scipy")


def test_help_does_not_wait_for_torch() -> None:
    program = f"import sys, cli; sys.exit(any(name in sys.modules for name in {(*HEAVY, 'numpy', 'pydantic', 'rich')}))"
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True)


@pytest.mark.parametrize(
    "command",
    [
        "pretrain --set optim.learning_rate=1",
        "pretrain -c configs/demo.toml --set train.batch=many",
        "finetune --set optim.learning_rate=1",
        "views --set optim.learning_rate=1 views.png",
        "check-data --set optim.learning_rate=1 bad.jsonl",
        "pack --set optim.learning_rate=1 shards",
        "bench-loader --set optim.learning_rate=1",
        "bench-train --set optim.learning_rate=1",
        "bench-scale --set optim.learning_rate=1",
        "experiment configs/experiment_hands.toml --set poses=many",
        "pretrain -c configs/demo.toml --print-config",
    ],
)
def test_a_configuration_is_answered_without_torch(command: str) -> None:
    program = f"""
import sys
from cli import main
try:
    main.main({command.split()})
except SystemExit as leaving:
    print([name for name in {HEAVY} if name in sys.modules])
    sys.exit(leaving.code)
"""
    found = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert found.stdout.splitlines()[-1] == "[]"
    assert found.returncode == (0 if "--print-config" in command else 2), found.stderr
    assert len(found.stderr.splitlines()) == found.returncode // 2


def test_the_printed_configuration_is_the_resolved_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wanted = tmp_path / 'a "quoted" folder'
    assert run_cli("pretrain", "--set", "train.batch=64", "--out", str(wanted), "--print-config") == 0
    file = tmp_path / "printed.toml"
    file.write_text(capsys.readouterr().out)
    config = load_config(Config, [file], [])
    assert config.train.batch == 64
    assert config.run.out == str(wanted)
    assert not wanted.exists()
