"""The command line: its help, and the configuration that it prints."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.command_line import run_cli
from train.config import Config, load_config


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


def test_help_does_not_wait_for_torch() -> None:
    program = "import sys, cli; sys.exit(any(name in sys.modules for name in ('torch', 'numpy', 'pydantic', 'rich')))"
    subprocess.run([sys.executable, "-c", program], cwd=Path(__file__).parents[1], check=True)


def test_the_printed_configuration_is_the_resolved_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wanted = tmp_path / 'a "quoted" folder'
    assert run_cli("pretrain", "--set", "train.batch=64", "--out", str(wanted), "--print-config") == 0
    file = tmp_path / "printed.toml"
    file.write_text(capsys.readouterr().out)
    config = load_config(Config, [file], [])
    assert config.train.batch == 64
    assert config.run.out == str(wanted)
    assert not wanted.exists()
