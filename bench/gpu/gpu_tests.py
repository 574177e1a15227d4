"""The tests that are marked `gpu`."""

from __future__ import annotations

import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

from bench.gpu.claims import Claim, Findings, Job

_ROOT = Path(__file__).parents[2]


def run_tests(job: Job) -> Findings:
    """All of them, in a process of their own; in a dry run they are only collected."""
    found = job.out / "gpu-tests.xml"
    # Warnings of a torch or DALI other than the locked one are not what is asked here.
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-W", "default", f"--junitxml={found}"]
    command += ["-p", "no:cacheprovider", f"--record-to={job.out}", "--record"]
    subprocess.run([*command, *(["--collect-only"] if job.tiny else [])], cwd=_ROOT, check=False)
    return Findings([claim_of(found)] if not job.tiny else [Claim("tests marked gpu", "collected", "-", None)])


def claim_of(junit: Path) -> Claim:
    """What pytest's report says: none may fail, and at least one has to run."""
    suite = next(ElementTree.parse(junit).getroot().iter("testsuite"))
    counted = {name: int(suite.get(name, "0")) for name in ("tests", "failures", "errors", "skipped")}
    bad = counted["failures"] + counted["errors"]
    passed = counted["tests"] - bad - counted["skipped"]
    told = f"{passed} passed, {bad} failed, {counted['skipped']} skipped"
    for case in suite.iter("testcase"):
        if {part.tag for part in case} & {"failure", "error"}:
            told += f"; failed: {case.get('name')}"
    return Claim("tests marked gpu", told, "all pass", passed > 0 and bad == 0)
