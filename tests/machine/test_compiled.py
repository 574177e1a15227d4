"""What Numba compiles: kept where a folder can be written, and made anew when a constant changes."""

import ctypes
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PR_CAPBSET_DROP, CAP_DAC_OVERRIDE = 24, 1  # of linux/prctl.h and linux/capability.h
PROGRAM = (
    "import numba\n"
    "from peclr_dali.numba_cache import cached\n"
    "from peclr_dali.package.limits import LIMIT\n"
    "@cached(numba.njit)\n"
    "def doubled(): return 2 * LIMIT\n"
    "if __name__ == '__main__': print(doubled(), sum(doubled.stats.cache_hits.values()))\n"
)


def bound_by_permissions() -> None:
    """What is read-only is so for root too, from the next program on."""
    ctypes.CDLL(None).prctl(PR_CAPBSET_DROP, CAP_DAC_OVERRIDE, 0, 0, 0)


def run(checkout: Path, **environment: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-m", "peclr_dali.package.doubled"], cwd=checkout, capture_output=True, text=True, timeout=300,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1", **environment}, preexec_fn=bound_by_permissions,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_a_changed_constant_of_another_file_is_compiled_anew(tmp_path: Path) -> None:
    package = tmp_path / "peclr_dali" / "package"
    package.mkdir(parents=True)
    shutil.copy(ROOT / "peclr_dali" / "numba_cache.py", package.parent)
    (package / "doubled.py").write_text(PROGRAM)
    found = []
    for limit in (3, 3, 4):
        (package / "limits.py").write_text(f"LIMIT = {limit}\n")
        found.append(run(tmp_path, NUMBA_CACHE_DIR=str(tmp_path / "kept")))
    assert found == [["6", "0"], ["6", "1"], ["8", "0"]]

    package.chmod(0o555)
    try:
        nowhere = run(tmp_path, NUMBA_CACHE_DIR="", XDG_CACHE_HOME="", HOME="/proc/nobody")
        assert nowhere == ["8", "0"], "compiled, where no folder can be written"
    finally:
        package.chmod(0o755)
