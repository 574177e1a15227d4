"""`bench-gpu`: what makes a claim hold or fail, and that a stage that breaks or hangs costs only itself."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

from bench.gpu import measured_stages, program_stages, prove
from bench.gpu.claims import Claim, Findings, Job, at_least, at_most, looked_at
from bench.measure import Rate
from bench.rows import append
from bench.training.step import Row, figures_of
from tests.command_line import run_cli


def rate(images_per_s: float) -> Rate:
    return Rate((images_per_s, images_per_s), 0.0, 1)


def held(claims: list[Claim]) -> list[bool | None]:
    return [claim.holds for claim in claims]


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path / "out", tmp_path / "data", tiny=True)


def test_a_figure_at_the_limit_holds() -> None:
    assert [at_least("", found, 2).holds for found in (1.99, 2.0, 2.01)] == [False, True, True]
    assert [at_most("", found, 2).holds for found in (1.99, 2.0, 2.01)] == [True, True, False]
    assert at_most("", float("nan"), 2).holds is False
    assert looked_at("", "3").holds is None


def test_the_loader_is_held_against_the_step_and_its_peers() -> None:
    peers = {"ours": 1, "OpenCV + DataLoader": 3.2, "OpenCV + DataLoader, lean": 2.7, "kornia": 1.07}
    row: dict[str, Any] = {
        "sources": "small",
        "settings": {"cores": 16},
        "loaders": [{"name": name, "ours_is": [ratio, 0, 9]} for name, ratio in peers.items()],
        "threads": {str(count): {"images_per_s": 1000.0 * count} for count in (4, 8, 16)},
        "step_images_per_s": 4000,
    }
    assert held(measured_stages.loader_claims(row)) == [True, True, False, True]
    assert "8 threads" in measured_stages.loader_claims(row)[0].what
    assert held(measured_stages.loader_claims(row | {"step_images_per_s": 4001}))[0] is False
    few = row | {"threads": {"2": {"images_per_s": 9000}}}
    assert "2 threads" in measured_stages.loader_claims(few)[0].what


def test_the_kernel_is_held_against_the_graph() -> None:
    rates = {"loader, fused": rate(90), "loader, graph": rate(90), "decode + views, fused": rate(99)}
    claims = measured_stages.views_claims(
        {**rates, "decode + views, graph": rate(100), "views only, fused": rate(7000)}
    )
    assert held(claims) == [True, False, None, None, None, None, None]
    assert claims[-1].found == "7000 images/s"


def step_figures(**changed: Any) -> Row:
    rates = {"cached": 1000.0, "loaded": 995.0, "gradient": 1020.0}
    rates |= {name: changed.pop(name) for name in rates.keys() & changed.keys()}
    figures = figures_of({name: rate(images_per_s) for name, images_per_s in rates.items()}, 2048, 2e9)
    sizes = {"device": "cuda:0", "batch": 2048, "recompute": "never", "waited_share": 0.005}
    return {**figures, **sizes, **changed}


def test_what_the_loader_and_the_optimiser_add_to_a_step() -> None:
    def found(waits: str | None = None, **changed: Any) -> list[bool | None]:
        return held(measured_stages.step_claims("resnet50", step_figures(**changed), 8e12, waits))[:4]

    assert found() == [True, True, True, True]
    assert found(loaded=980.0) == [False, True, True, True]
    assert found(waited_share=0.011) == [True, False, True, True]
    assert found(gradient=1040.0) == [True, True, False, True]
    assert found(waits="called a synchronizing operation") == [True, True, True, False]
    assert found(device="cpu")[3] is None
    peak = measured_stages.step_claims("resnet50", step_figures(), 8e12, None)[-1]
    assert "25.0% of its matrix peak" in peak.found


def test_the_matrix_peak_counts_multiplications_and_additions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.utils.benchmark.Timer.blocked_autorange", lambda self: SimpleNamespace(median=1e-3))
    assert measured_stages.matrix_peak(torch.device("cpu"), 32) == pytest.approx(2 * 32**3 * 1e3)


def test_memory_counts_what_the_stage_added_to_the_card() -> None:
    def found(highest: float, slow: float) -> list[bool | None]:
        return held(
            measured_stages.memory_claims("peclr_rn50.toml", 11e9, 1e9, highest, rate(slow), rate(140), on_gpu=True)
        )

    assert found(12e9, 100) == [True, True]
    assert found(12.01e9, 99) == [False, False]


def test_the_highest_memory_is_seen_while_it_is_there() -> None:
    with measured_stages.bytes_seen(torch.device("cpu")) as seen:
        time.sleep(0.2)
        before = seen[-1]
        block = np.ones(400 << 20, np.uint8)  # far above the bound: objects of other tests may be freed meanwhile
        for _ in range(100):  # a look takes its time on a busy machine
            if max(seen) - before > 150 << 20:
                break
            time.sleep(0.1)
        del block
    assert max(seen) - before > 150 << 20


JUNIT = '<testsuites><testsuite tests="{}" failures="{}" errors="0" skipped="{}">{}</testsuite></testsuites>'


def test_tests_have_to_run_and_to_pass(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"

    def found(tests: int, failures: int, skipped: int, cases: str = "") -> Claim:
        report.write_text(JUNIT.format(tests, failures, skipped, cases))
        return program_stages.claim_of(report)

    assert found(40, 0, 1).holds is True
    assert found(40, 0, 40).holds is False  # without a GPU
    failed = found(40, 1, 0, '<testcase name="good"/><testcase name="bad"><failure/></testcase>')
    assert failed.holds is False
    assert failed.found == "39 passed, 1 failed, 0 skipped; failed: bad"


def test_a_real_run_was_resumed_and_long_enough_and_learnt() -> None:
    rows = [
        {"step": 10 * n, "epoch": float(n), "images_per_s": 50.0, "wait_share": 0.002, "loss": 8 - n} for n in (1, 2, 3)
    ]

    def found(changed: list[dict[str, Any]], stopped_at: int = 20) -> list[bool | None]:
        return held(program_stages.claims(changed, images=5000, stopped_at=stopped_at, wanted_s=300))[:4]

    assert found(rows) == [True, True, True, True]  # 3 epochs of 100 s
    assert found(rows[:2]) == [False, False, True, True]  # it ended where it was stopped
    assert found(rows, stopped_at=0) == [True, False, True, True]
    assert found([*rows[:2], rows[1], rows[2]])[1] is False  # steps that were made twice
    assert found([{**one, "loss": 7.0} for one in rows])[2] is False
    assert found([{**one, "wait_share": 0.02} for one in rows])[3] is False


def good(job: Job) -> Findings:
    append(job.out / "loader.jsonl", {"bench": "loader"})
    return {"claims": [at_least("figure", 3, 2)], "more": 1}


def broken(job: Job) -> Findings:
    raise RuntimeError("CUDA error:\n out of memory")


def gone(job: Job) -> Findings:
    os._exit(3)


def hanging(job: Job) -> Findings:
    child = subprocess.Popen(["sleep", "100"])
    (job.out / "child").write_text(str(child.pid))
    child.wait()
    return {"claims": []}


def assert_gone(pid: int) -> None:
    time.sleep(0.2)
    status = Path(f"/proc/{pid}/status")
    assert not status.exists() or "State:\tZ" in status.read_text()


@pytest.mark.filterwarnings("ignore:.*fork")
def test_a_stage_that_fails_or_hangs_does_not_affect_the_others(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prove, "_START", "fork")  # these stages need no fresh process, which takes seconds
    job.out.mkdir()
    stages = {"broken": (broken, 60), "gone": (gone, 60), "hanging": (hanging, 3), "good": (good, 60)}
    rows = [prove.prove_stage(name, *stage, job) for name, stage in stages.items()]
    told = {row["stage"]: [(claim["found"], claim["holds"]) for claim in row["claims"]] for row in rows}
    assert told == {
        "broken": [("CUDA error: out of memory", False)],
        "gone": [("its process ended with 3", False)],
        "hanging": [("not done after 3 s", False)],
        "good": [("3 x", True)],
    }
    assert rows[-1]["more"] == 1
    assert json.loads((job.out / "loader.jsonl").read_text()) == {"bench": "loader"}
    assert_gone(int((job.out / "child").read_text()))
    console = Console(width=140, record=True, file=io.StringIO())
    console.print(prove.as_table(rows, dry=True))
    assert "not done after 3 s" in console.export_text()


@pytest.mark.filterwarnings("ignore:.*fork")
def test_a_stage_ends_with_what_runs_it(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prove, "_START", "fork")
    job.out.mkdir()

    def interrupt(signal_number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 2)
    try:
        with pytest.raises(KeyboardInterrupt):
            prove.prove_stage("hanging", hanging, 60, job)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert_gone(int((job.out / "child").read_text()))


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--stage", "lodaer"], "--stage lodaer: expected one of tests, loader,"),
        ([], "torch finds no GPU: check nvidia-smi, or use --dry-run"),
    ],
)
def test_stages_that_cannot_run_are_reported(
    arguments: list[str], told: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert run_cli("bench-gpu", *arguments) == 2
    assert told in capsys.readouterr().err


def test_missing_images_are_reported(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert run_cli("bench-gpu", "--data", "none") == 2
    assert "--data none is not a folder: make it with 'python cli.py make-data none'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("claims", "tiny", "proved"),
    [
        ([("figure", True), ("other", None)], False, True),
        ([("figure", True), ("other", False)], False, False),
        ([("figure", False)], True, True),
        ([("the stage itself", False)], True, False),
    ],
)
def test_the_proof_holds_only_if_every_claim_holds(
    claims: list[tuple[str, bool | None]], tiny: bool, proved: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = [{"what": what, "found": "1", "wanted": "2", "holds": holds} for what, holds in claims]
    row = {"stage": "run", "seconds": 1.0, "machine": {"gpu": "card"}, "claims": found}
    limits_s: list[float] = []

    def prove_stage(name: str, stage: object, limit_s: float, job: Job) -> dict[str, Any]:
        limits_s.append(limit_s)
        return row

    monkeypatch.setattr(prove, "prove_stage", prove_stage)
    monkeypatch.setattr(prove, "make_dataset", lambda *arguments, **options: None)
    assert prove.prove(["run"], Job(tmp_path, tmp_path, tiny)) is proved
    assert limits_s == [prove.STAGES["run"][1] * (10 if tiny else 1)]  # a dry run may be on a slow or busy machine


@pytest.mark.slow  # every stage, in little
def test_all_stages_can_be_dry_run(tmp_path: Path) -> None:
    assert prove.prove(list(prove.STAGES), Job(tmp_path / "out", tmp_path / "hands", tiny=True))
    rows = [json.loads(line) for line in (tmp_path / "out" / "gpu.jsonl").read_text().splitlines()]
    assert [row["stage"] for row in rows] == list(prove.STAGES)
    assert all(row["dry_run"] and row["claims"] for row in rows)
    assert {"loader.jsonl", "train.jsonl", "report.html", "pretrain-loss.png"} <= {
        path.name for path in (tmp_path / "out").iterdir()
    }
