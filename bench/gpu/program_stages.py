"""Stages that run other programs: the tests of a GPU, and one real run from data to the report's page."""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
import signal
import statistics
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from bench.gpu.claims import CONFIGS, Claim, Findings, Job, at_least, at_most, looked_at
from bench.training.step import cached_rate
from pipelines.sources import load_index
from synthetic import make_dataset
from train.runs.folder import RunFolder
from train.runs.log import progress_bar

_ROOT: Final = CONFIGS.parent
_RENDERING_S: Final = 60.0
_TRAINING_S: Final = 300.0
_FEW_POSES: Final = 200
_MARGIN: Final = 1.1
"""Factor of the training time, so that the steps alone take at least `_TRAINING_S`."""


def run_tests(job: Job) -> Findings:
    """Run the tests marked `gpu` in a separate process. A dry run only collects them."""
    found = job.out / "gpu-tests.xml"
    found.unlink(missing_ok=True)  # a process that is killed writes none, and that of an earlier call says nothing
    # Another version of torch or DALI than the locked one may warn; that is not tested here.
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-W", "default", f"--junitxml={found}"]
    command += ["-p", "no:cacheprovider", f"--record-to={job.out}", "--record"]
    subprocess.run([*command, *(["--collect-only"] if job.tiny else [])], cwd=_ROOT, check=False)
    return {"claims": [looked_at("tests marked gpu", "collected") if job.tiny else claim_of(found)]}


def claim_of(junit: Path) -> Claim:
    """The claim of pytest's report: no test failed, and at least one ran."""
    suite = next(ElementTree.parse(junit).getroot().iter("testsuite"))
    counted = {name: int(suite.get(name, "0")) for name in ("tests", "failures", "errors", "skipped")}
    bad = counted["failures"] + counted["errors"]
    passed = counted["tests"] - bad - counted["skipped"]
    told = f"{passed} passed, {bad} failed, {counted['skipped']} skipped"
    for case in suite.iter("testcase"):
        if {part.tag for part in case} & {"failure", "error"}:
            told += f"; failed: {case.get('name')}"
    return Claim("tests marked gpu", told, "all pass", passed > 0 and bad == 0)


def real_run(job: Job) -> Findings:
    """Render hands for a minute, pre-train a ResNet-50 on them for at least five minutes, fine-tune and evaluate."""
    if not job.tiny:
        job = dataclasses.replace(job, data=_render(job.out))
    runs = job.out / "runs"
    shutil.rmtree(runs, ignore_errors=True)  # a finished run would not train again
    pretrained, tuned = runs / "pretrain", runs / "finetune"
    made = _pretrain(job, pretrained)
    few = ["data.label_fraction=0.25", "train.epochs=12", "geometry.side_px=128", f"encoder.weights={pretrained}"]
    _cli(*_arguments("finetune", tuned, ["finetune_rn50.toml"], job.overrides(*few)))
    _cli("evaluate", tuned, "--set", "data.part=evaluation", "--set", "data.split=all")
    _cli("report", pretrained, tuned, "--out", job.out / "report.html")
    metrics = json.loads((tuned / "evaluation" / "metrics.json").read_text())["metrics"]
    told = ", ".join(f"{name} {metrics[name]['value']:.3f}" for name in ("epe_cm", "pa_epe_cm", "epe_px"))
    made.append(looked_at("real run: fine-tuned, on the evaluation part", told))
    shutil.copy(pretrained / "loss.png", job.out / "pretrain-loss.png")
    return {"claims": made, "metrics": metrics_of(pretrained), "evaluation": metrics}


def _pretrain(job: Job, out: Path) -> list[Claim]:
    """Train in two parts, so that resuming is tested. The number of epochs is set from a measured rate."""
    files = ["peclr_rn50.toml", "a100.toml"]
    config = job.config(*files, overrides=["train.compile=false"])
    images = len(load_index(config.data))
    rate = cached_rate(config, job.step_settings())
    wanted_s = 2.0 if job.tiny else _TRAINING_S
    epochs = max(2, math.ceil(_MARGIN * wanted_s * rate.mean / images))
    steps = epochs * (images // config.train.batch)
    settings = ["train.compile=false", f"train.epochs={epochs}", f"optim.warmup_epochs={epochs / 10}"]
    settings.append(f"run.log_every={max(1, steps // 100)}")
    arguments = _arguments("pretrain", out, files, job.overrides(*settings))
    first_leg = subprocess.Popen(_command(*arguments), cwd=_ROOT)
    while first_leg.poll() is None and not any(row["step"] >= steps / 2 for row in metrics_of(out)):
        time.sleep(0.1)
    first_leg.send_signal(signal.SIGTERM)
    first_leg.wait()
    rows = metrics_of(out)
    stopped_at = rows[-1]["step"] if rows else 0
    _cli(*arguments)
    return claims(metrics_of(out), images=images, stopped_at=stopped_at, wanted_s=wanted_s)


def claims(rows: Sequence[dict[str, Any]], *, images: int, stopped_at: int, wanted_s: float) -> list[Claim]:
    """Claims: training was long enough, was stopped and resumed, did not wait for data, and the loss fell."""
    steps = [row["step"] for row in rows]
    seconds = sum(
        (row["epoch"] - before) * images / row["images_per_s"]
        for row, before in zip(rows, [0.0, *(row["epoch"] for row in rows)], strict=False)
    )
    whole = 0 < stopped_at < steps[-1] and steps == sorted(set(steps))
    rate = statistics.median(row["images_per_s"] for row in rows)
    return [
        at_least("real run: time of all steps", seconds, wanted_s, "s"),
        Claim("real run: stopped and resumed", f"after step {stopped_at} of {steps[-1]}", "before the end", whole),
        at_most("real run: last loss over first", rows[-1]["loss"] / rows[0]["loss"], 0.98),
        at_most("real run: waiting for data, median", 100 * statistics.median(r["wait_share"] for r in rows), 1, "%"),
        looked_at("real run: rate, median", f"{rate:.0f} images/s on {images} images"),
    ]


def metrics_of(run: Path) -> list[dict[str, Any]]:
    """The metrics that a run has written so far."""
    return RunFolder(run, keep=1).read_metrics()


def _render(out: Path) -> Path:
    """Render a few hands to measure the speed, then as many as the time allows."""
    for before in ("few", "hands"):
        shutil.rmtree(out / before, ignore_errors=True)
    marks: list[tuple[float, int]] = []
    make_dataset(
        out / "few", poses=_FEW_POSES, seed=0, progress=lambda done, total: marks.append((time.perf_counter(), done))
    )
    shutil.rmtree(out / "few")
    (began, first), (ended, last) = marks[0], marks[-1]
    images = _RENDERING_S * (last - first) / (ended - began)
    with progress_bar("rendering") as progress:
        make_dataset(out / "hands", poses=max(_FEW_POSES, round(images / 4)), seed=0, progress=progress)
    return out / "hands"


def _arguments(command: str, out: Path, files: Sequence[str], overrides: Sequence[str]) -> list[str]:
    configured = [word for name in files for word in ("-c", str(CONFIGS / name))]
    changed = [word for override in overrides for word in ("--set", override)]
    return [command, *configured, *changed, "--out", str(out), "--resume", "auto"]


def _command(*arguments: object) -> list[str]:
    return [sys.executable, str(_ROOT / "cli.py"), *map(str, arguments)]


def _cli(*arguments: object) -> None:
    subprocess.run(_command(*arguments), cwd=_ROOT, check=True)
