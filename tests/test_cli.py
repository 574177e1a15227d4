"""The command line: its help, and the configuration that it prints."""

import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from peclr_dali import __main__ as program
from peclr_dali.cli import main
from peclr_dali.train.runs import log
from tests.command_line import refusal, run_cli

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("arguments", [[], ["--help"], *([name, "--help"] for name in main.commands)])
def test_help_is_complete(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli(*arguments) == 0
    captured = capsys.readouterr()
    assert captured.out.startswith("Usage:")
    assert not captured.err


def test_the_help_lists_each_command_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    run_cli("--help")
    lines = capsys.readouterr().out.splitlines()
    for name, command in main.commands.items():
        (line,) = (line for line in lines if line.split()[:1] == [name])
        assert line.endswith(f"  {command.get_short_help_str(200)}")
        assert len(line) <= 80


HEAVY = ("torch", "torchvision", "nvidia", "numba", "cv2", "scipy")


WITHOUT_TORCH = {
    "--help": 0,
    "pretrain --set optim.learning_rate=1": 2,
    "finetune --set optim.learning_rate=1": 2,
    "views --set optim.learning_rate=1 views.png": 2,
    "check-data --set optim.learning_rate=1 bad.jsonl": 2,
    "check-data /proc/bad.jsonl": 2,
    "pack --set optim.learning_rate=1 shards": 2,
    "bench-loader --set optim.learning_rate=1": 2,
    "bench-train --set optim.learning_rate=1": 2,
    "probe --set optim.learning_rate=1": 2,
    "pretrain -c configs/demo.toml --print-config": 0,
}
"""Commands that import nothing heavy, with their exit codes."""

PROGRAM = """
import contextlib, io, json, sys
from peclr_dali import cli
answers = {"import": [0, "", "", sorted(sys.modules)]}
for command in json.loads(sys.argv[1]):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            cli.main.main(command.split())
        except SystemExit as leaving:
            code = leaving.code
    answers[command] = [code, out.getvalue(), err.getvalue(), sorted(sys.modules)]
print(json.dumps(answers))
"""


def test_a_configuration_is_answered_without_torch() -> None:
    """In one process, which has imported nothing else: the first command that imports torch is the first that fails."""
    found = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps([*WITHOUT_TORCH])],
        cwd=ROOT, check=True, capture_output=True, text=True,
    )  # fmt: skip
    answers = json.loads(found.stdout)
    assert not {*HEAVY, "numpy", "pydantic", "rich"} & set(answers.pop("import")[3])
    heavy = {command: set(HEAVY) & set(modules) for command, (*_, modules) in answers.items()}
    assert {command: found for command, found in heavy.items() if found} == {}
    assert {command: code for command, (code, *_) in answers.items()} == WITHOUT_TORCH
    lines = {command: err.count("\n") for command, (_, _, err, _) in answers.items()}
    assert lines == {command: code // 2 for command, code in WITHOUT_TORCH.items()}


@pytest.mark.parametrize("name", ["\x1b[2J\x1b]0;title\x07", "a\nerror: everything is lost"])
def test_names_of_files_are_escaped_on_the_terminal(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    error = refusal(capsys, "pretrain", "--set", f"data.root={tmp_path / name}", "--set", "data.source=folder")
    assert error.startswith("error: ")
    assert all(character.isprintable() for character in error[:-1])


@pytest.mark.usefixtures("logging_set_back")
def test_names_of_files_are_escaped_in_the_log_and_secrets_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    log.configure_logging()
    logging.getLogger("train").warning(
        "%s: no JPEG", "a\nerror: lost\x1b[31m at http://me:a@b/@c.org/d?sig=e 'f?g' s3:/me:h@i;j=k"
    )
    assert capsys.readouterr().err == (
        "a\\nerror: lost\\x1b[31m at http://***@c.org/d?*** 'f?g' s3://***@i;*** no JPEG\n"
    )


def test_a_full_disk_behind_stdout_is_one_line() -> None:
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, "cli.py", "pretrain", "--print-config"]
        done = subprocess.run(command, cwd=ROOT, stdout=full, stderr=subprocess.PIPE, text=True, timeout=300)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert done.stderr.startswith("error: the output: No space left on device. Check")


@pytest.mark.slow
def test_a_backend_of_matplotlib_for_notebooks_changes_nothing(tmp_path: Path) -> None:
    call = subprocess.run(
        [sys.executable, ROOT / "cli.py", "report", tmp_path],
        env={**os.environ, "MPLBACKEND": "module://matplotlib_inline.backend_inline"},
        capture_output=True, check=False, text=True,
    )  # fmt: skip
    assert (call.returncode, call.stderr.partition(":")[0]) == (2, "error"), call.stderr
    assert "is not a run's folder" in call.stderr


KILL = "os.kill(os.getpid(), signal.{})"


@pytest.mark.parametrize(
    ("name", "program", "number"),
    [
        ("click.py", KILL, signal.SIGINT),
        ("sitecustomize.py", f"import atexit\natexit.register(lambda: {KILL})", signal.SIGINT),
        ("sitecustomize.py", f"import atexit\natexit.register(lambda: {KILL})", signal.SIGUSR1),
        (
            "click.py",  # the second of a run that waits
            "from peclr_dali.train.distributed.interrupt import StopSignals as Stop\n"
            "with Stop(alone=True):\n [signal.raise_signal(signal.{}) for _ in range(2)]\n while True: pass",
            signal.SIGINT,
        ),
    ],
)
def test_a_signal_during_the_imports_or_pythons_end_is_silent(
    name: str, program: str, number: signal.Signals, tmp_path: Path
) -> None:
    (tmp_path / name).write_text(f"import os, signal\n{program.format(number.name)}\n")
    call = subprocess.run(
        [sys.executable, ROOT / "cli.py", "--help"],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        check=False,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background jobs ignore it
    )
    assert (call.returncode, call.stderr) == (-number, "")


@pytest.mark.parametrize(("number", "end"), [(signal.SIGTERM, SystemExit), (signal.SIGINT, KeyboardInterrupt)])
def test_a_signal_waits_until_a_lock_is_free(number: int, end: type[BaseException]) -> None:
    """An exception as soon as a condition's lock is taken would leave it taken for ever."""
    interrupted = partial(signal.raise_signal, number)  # runs the handler in the frame of `Condition.__enter__`
    lock = SimpleNamespace(__enter__=interrupted, __exit__=Mock(return_value=None), acquire=None, release=None)
    before = {it: signal.signal(it, program._end) for it in (number, signal.SIGALRM)}
    try:
        with pytest.raises(end), threading.Condition(lock):  # type: ignore[arg-type]
            time.sleep(60)
    finally:
        for it, handler in before.items():
            signal.signal(it, handler)
    lock.__exit__.assert_called_once()
    assert program._UNDIVIDED[threading.__file__] < {*vars(threading.Condition)}, "this Python names them otherwise"


def test_what_torch_logs_when_its_import_is_interrupted_is_not_printed() -> None:
    program = (
        "import logging\nfrom peclr_dali.train.runs.log import configure_logging\nconfigure_logging()\n"
        "logging.getLogger('torch._subclasses.fake_tensor').info('FakeTensor cache stats')"
    )
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, capture_output=True).stderr == b""


def test_a_file_has_a_line_of_progress_now_and_then(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(log, "_QUIET_S", 0)
    with log.progress_bar("packing") as progress:
        progress(1, 3)
        assert "1/3 ETA" in capsys.readouterr().err


NAMELESS = ["unshare", "--map-user=12345"]


@pytest.mark.skipif(
    shutil.which("unshare") is None
    or subprocess.run([*NAMELESS, "true"], check=False, capture_output=True).returncode != 0,
    reason="no user namespaces",
)
@pytest.mark.parametrize(
    ("home", "arguments", "error"),
    [
        pytest.param(None, ["-c", "import torch, peclr_dali, torch._dynamo"], "", marks=pytest.mark.slow),
        ("/proc", [ROOT / "cli.py", "export", "run", "e.pth"], "error: "),
    ],
    ids=["program", "command"],
)
def test_a_user_id_without_a_name_is_no_obstacle(
    home: str | None, arguments: list[str], error: str, tmp_path: Path
) -> None:
    """As in `docker run --user 12345`: for a program of one's own, and for a command."""
    environment = {name: value for name, value in os.environ.items() if name not in ("USER", "LOGNAME", "HOME")}
    environment |= {"PYTHONPATH": str(ROOT)} | ({} if home is None else {"HOME": home})
    call = subprocess.run(
        [*NAMELESS, sys.executable, *arguments], env=environment, cwd=tmp_path,
        capture_output=True, check=False, text=True,
    )  # fmt: skip
    assert (call.returncode, call.stderr.count("\n")) == ((2, 1) if error else (0, 0)), call.stderr
    assert call.stderr.startswith(error)
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize(
    ("words", "runs", "compared"),
    [
        ("a", ["a"], []),
        ("a --compare b", ["a"], ["b"]),
        ("a_0 a_1 --compare b_0 b_1 --groups 4", ["a_0", "a_1"], ["b_0", "b_1"]),
        ("--groups 4 a --compare b --compare c", ["a"], ["b", "c"]),
    ],
)
def test_compare_takes_the_words_up_to_the_next_option(
    words: str, runs: list[str], compared: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    given = main.commands["evaluate"].make_context("evaluate", words.split()).params
    assert [[*map(str, given[name])] for name in ("runs", "compare")] == [runs, compared]
    assert "--compare" in refusal(capsys, "evaluate", *words.split(), "--compare")
