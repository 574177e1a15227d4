"""Commands, and only these, set malloc to keep freed memory."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

FAULTS = """
import contextlib, resource, sys
import numpy as np
from peclr_dali import __main__ as program
if sys.argv.pop() == "commanded":
    sys.argv += ["views", "--help"]
    with contextlib.suppress(SystemExit):
        program.run()
def use():
    [np.ones(1 << 18, np.uint8) for _ in range(64)]  # images of a batch: malloc's own thresholds do not cover them
for _ in range(3):
    use()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20):
    use()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def test_a_command_uses_freed_memory_again_without_new_pages_and_an_import_does_not() -> None:
    def faults(how: str) -> int:
        words = [sys.executable, "-c", FAULTS, how]
        return int(subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()[-1])

    assert faults("commanded") < 100 < faults("imported")
