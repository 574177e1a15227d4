"""Commands run where neither the checkout nor the home can be written to."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from peclr_dali.machine.compiled import choose_cache_folder
from peclr_dali.machine.user_cache import user_cache
from tests.train import tiny_run

ROOT = Path(__file__).parents[2]
PR_CAPBSET_DROP, CAP_DAC_OVERRIDE = 24, 1  # of linux/prctl.h and linux/capability.h


@pytest.fixture
def place() -> Iterator[Path]:
    """A checkout that is read-only, images and a folder for output."""
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        unneeded = shutil.ignore_patterns("__pycache__", "networks", "results")
        shutil.copytree(ROOT / "peclr_dali", place / "checkout" / "peclr_dali", ignore=unneeded)
        shutil.copy(ROOT / "cli.py", place / "checkout")
        tiny_run.write_images(place / "images", 3)
        (place / "out").mkdir()
        folders = [path for path in (place / "checkout").rglob("*") if path.is_dir()]
        for folder in folders:
            folder.chmod(0o555)
        yield place
        for folder in folders:
            folder.chmod(0o755)


def bound_by_permissions() -> None:
    """What is read-only is so for root too, from the next program on."""
    ctypes.CDLL(None).prctl(PR_CAPBSET_DROP, CAP_DAC_OVERRIDE, 0, 0, 0)


def run_bound(place: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    left_out = ("NUMBA_CACHE_DIR", "TRITON_CACHE_DIR", "XDG_CACHE_HOME")
    kept = {name: value for name, value in os.environ.items() if name not in left_out}
    return subprocess.run(
        [sys.executable, *arguments], cwd=place / "checkout", capture_output=True, text=True, timeout=300,
        env={**kept, "HOME": "/proc/nobody", "TMPDIR": str(place / "out"), "CUDA_VISIBLE_DEVICES": ""},
        preexec_fn=bound_by_permissions,
    )  # fmt: skip


def test_a_command_keeps_what_it_compiles_in_a_temporary_folder(place: Path) -> None:
    settings = ["--set", "data.source=folder", "--set", f"data.root={place / 'images'}", "--set", "train.device=cpu"]
    done = run_bound(place, "cli.py", "check-data", *settings, str(place / "out" / "bad.jsonl"))
    assert done.returncode == 0, done.stderr
    assert "0 of 3 images cannot be used" in done.stdout
    (kept,) = (place / "out").glob("peclr-dali-numba-*")
    assert list(kept.rglob("*.nbi"))
    assert kept.stat().st_mode & 0o777 == 0o700


def test_importing_a_module_needs_no_folder(place: Path) -> None:
    program = "import os, peclr_dali.pipelines.render.cpu_kernels; print('NUMBA_CACHE_DIR' in os.environ)"
    done = run_bound(place, "-c", program)
    assert (done.returncode, done.stdout) == (0, "False\n"), done.stderr


@pytest.mark.parametrize("where", ["command", "container"])
def test_torch_compiles_for_a_user_without_a_name(where: str, place: Path) -> None:
    """Its compiler asks for the name when it is imported, and Triton would write into "~" in the current folder."""
    containerfile = (ROOT / "launch" / "Containerfile").read_text()
    of_container = dict(re.findall(r"(\w+)=(\S+)", containerfile.partition("\nENV ")[2].splitlines()[0]))
    program = (
        "import os, pwd, sys\n"
        "def unknown(uid): raise KeyError(uid)\n"
        "pwd.getpwuid = unknown\n"
        "for name in ('LOGNAME', 'USER', 'LNAME', 'USERNAME'): os.environ.pop(name, None)\n"
        + ("from peclr_dali.machine.compiled import choose_cache_folder; choose_cache_folder()\n" if where == "command"
           else f"os.environ |= {of_container}\n")
        + "import torch._inductor.codecache, triton\n"
        "print(triton.knobs.cache.dir)\n"
    )  # fmt: skip
    done = run_bound(place, "-c", program)
    assert done.returncode == 0, done.stderr
    temporary = str(place / "out" / f"peclr-dali-triton-{os.getuid()}")
    assert done.stdout.strip() == {"command": temporary, "container": "/tmp/triton"}[where]


def test_a_relative_cache_is_ignored(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Other packages would take it from the environment and make their folders in the current one."""
    monkeypatch.setenv("XDG_CACHE_HOME", "cache")
    assert user_cache() == Path("~/.cache").expanduser()
    choose_cache_folder()
    assert "XDG_CACHE_HOME" not in os.environ
    assert "XDG_CACHE_HOME = 'cache' is not an absolute path: ignored" in caplog.text


def test_a_folder_of_somebody_else_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "closed").touch()
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "closed"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    planted = tmp_path / f"peclr-dali-numba-{os.getuid()}"
    planted.mkdir()
    planted.chmod(0o777)
    choose_cache_folder()
    chosen = Path(os.environ["NUMBA_CACHE_DIR"])
    assert chosen.parent == tmp_path
    assert chosen != planted
    planted.chmod(0o700)
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "closed"))
    choose_cache_folder()
    assert Path(os.environ["NUMBA_CACHE_DIR"]) == planted
    choose_cache_folder()  # as a rank does, whose launcher has chosen
    assert Path(os.environ["NUMBA_CACHE_DIR"]) == planted


def test_a_changed_constant_of_another_file_is_compiled_anew(tmp_path: Path) -> None:
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "peclr_dali" / "machine", tmp_path / "peclr_dali" / "machine", ignore=ignored)
    package = tmp_path / "peclr_dali" / "package"
    package.mkdir()
    (package / "doubled.py").write_text(
        "import numba\n"
        "from peclr_dali.machine.compiled import cached\n"
        "from peclr_dali.package.limits import LIMIT\n"
        "@cached(numba.njit)\n"
        "def doubled(): return 2 * LIMIT\n"
        "if __name__ == '__main__': print(doubled(), sum(doubled.stats.cache_hits.values()))\n"
    )
    found = []
    for limit in (3, 3, 4):
        (package / "limits.py").write_text(f"LIMIT = {limit}\n")
        done = subprocess.run(
            [sys.executable, "-m", "peclr_dali.package.doubled"], cwd=tmp_path, capture_output=True, text=True,
            timeout=300,
            env={**os.environ, "NUMBA_CACHE_DIR": str(tmp_path / "kept"), "PYTHONDONTWRITEBYTECODE": "1"},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        found.append(done.stdout.split())
    assert found == [["6", "0"], ["6", "1"], ["8", "0"]]
