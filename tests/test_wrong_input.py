"""Input that is wrong ends in one line that helps and exit code 2, and leaves nothing behind."""

import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from tests.command_line import as_options, refusal, run_cli
from tests.train import tiny_hands, tiny_run

STEP = "checkpoints/step_000000001.pt"


def pretrain(*overrides: str, resume: str = "never", out: str = "{root}/out") -> list[str]:
    """A tiny run on the good images; {root} is to be filled in."""
    settings = (*tiny_run.TINY, "train.epochs=1", "data.root={root}/images", f"run.out={out}", *overrides)
    return ["pretrain", "--resume", resume, *as_options(settings)]


def finetune(*overrides: str, start: str = "random", resume: str = "never", out: str = "{root}/tuned") -> list[str]:
    """A tiny fine-tuning run on hands that were drawn."""
    settings = (*tiny_hands.TINY, "data.root={root}/hands", f"run.out={out}", *overrides)
    return ["finetune", "--resume", resume, "--from", start, *as_options(settings)]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Good and bad input side by side."""
    root = tmp_path_factory.mktemp("cli")
    tiny_run.write_images(root / "images", count=12)
    (root / "a_file").write_text("not a folder\n")
    (root / "thesis").mkdir()
    (root / "thesis" / "config.toml").write_text("# mine\n[run]\nlog_every = 1\n")
    (root / "thesis" / "metrics.jsonl").write_text("mine\n")
    tiny_hands.write_hands(root / "hands", 12)

    assert run_cli(*(word.format(root=root) for word in pretrain(out="{root}/run"))) == 0
    for name in ("torn_config", "without_checkpoint"):
        shutil.copytree(root / "run", root / name)
    (root / "torn_config" / "config.toml").write_text('[run]\nout = "')
    shutil.rmtree(root / "without_checkpoint" / "checkpoints")
    return root


@pytest.fixture(autouse=True)
def single_process(monkeypatch: pytest.MonkeyPatch, without_torchrun: None, logging_set_back: None) -> None:
    """As on a machine without GPU and without torchrun."""
    for module in ("cli", "train.commands.options"):
        monkeypatch.setattr(f"peclr_dali.{module}.CALL", "python cli.py")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def snapshot(root: Path) -> dict[str, tuple[int, int]]:
    """Every path under a folder; with the size and the moment of its last change if it is a file."""
    paths = {path: path.lstat() for path in root.rglob("*")}
    return {str(path): (stat.st_size, stat.st_mtime_ns) if path.is_file() else (0, 0) for path, stat in paths.items()}


WRONG: dict[str, tuple[Sequence[str], Sequence[str]]] = {
    # Command lines.
    "unknown command": (["pretran"], ["'pretran'", "Did you mean 'pretrain'?", "python cli.py --help"]),
    "unknown option": ([*pretrain(), "--resme=auto"], ["--resme", "--resume", "python cli.py pretrain --help"]),
    "path left to a shell": (["make-data", "~nobody/hands"], ["'OUT': '~nobody/hands': ~ and $NAME", "write it out"]),
    # Data.
    "missing folder": (pretrain("data.root={root}/nowhere"), ["{root}/nowhere: ", "No such file", "Check the path"]),
    # Sizes.
    "fewer images than a batch": (
        pretrain("train.batch=16"),
        [
            "{root}/images has 12 images",
            "train.batch = 16",
            "use more images, a larger data.label_fraction, or --set train.batch=12",
        ],
    ),
    "the paper's batch on few images": (
        pretrain("train.batch=2048", "train.micro_batch=128"),
        ["fewer than train.batch = 2048: use more images, a larger data.label_fraction, or --set train.batch=12 --set"],
    ),
    # The machine.
    "no GPU": (pretrain("train.device=cuda"), ['train.device = "cuda"', "no GPU here", '"cpu"']),
    # Weights and runs.
    "folder of somebody's own configuration": (
        pretrain(out="{root}/thesis", resume="auto"),
        ["{root}/thesis holds files, but not a run", "run.out="],
    ),
    "run.out is a file": (pretrain(out="{root}/a_file"), ["{root}/a_file: File exists", "Check the path"]),
    "run.out among the images": (
        pretrain(out="{root}/images/run"),
        ["{root}/images/run is within {root}/images, whose images are read", "Name a place outside"],
    ),
    "torn config": (
        pretrain(out="{root}/torn_config", resume="auto"),
        ["{root}/torn_config/config.toml: Unterminated string", "expected a TOML file"],
    ),
    # Fine-tuning.
    "fine-tuning into pre-training's folder": (
        finetune(out="{root}/run", resume="auto"),
        ["{root}/run/config.toml is of another run", "run.out="],
    ),
    "submission of the training part": (
        ["evaluate", "{root}/run", "--freihand-submission", "--set", "data.part=training"],
        ["--freihand-submission takes one RUN and data.part = 'evaluation'", "leave --set data.part=... out"],
    ),
    "prediction by pre-training": (
        ["predict", "{root}/run", "{root}/images/00.jpg"],
        ["{root}/run/" + STEP + " is from pre-training", "python cli.py finetune --from {root}/run"],
    ),
    "prediction in no box": (
        ["predict", "{root}/run", "{root}/images/00.jpg", "--box", "1,2"],
        ["'--box': '1,2': expected", "40,30", "python cli.py predict --help"],
    ),
    "prediction of no size": (
        ["predict", "{root}/run", "{root}/images/00.jpg", "--scale-m", "nan"],
        ["nan", "--scale-m"],
    ),
    "a device as configuration": (["pretrain", "-c", "/dev/zero"], ["/dev/zero: is a pipe or a device", "TOML"]),
    "no file on a disk": (["pretrain", "-c", "/proc/self/../version"], ["version: is a pipe or a device", "TOML"]),
    "read-out of an encoder that is not there": (
        ["probe", "--from", "{root}/nothing", "--out", "{root}/probed", "--set", "data.root={root}/hands"],
        ["encoder.weights = '{root}/nothing' does not exist"],
    ),
    # The other commands.
    "export without checkpoint": (
        ["export", "{root}/without_checkpoint", "{root}/e.pth"],
        ["{root}/without_checkpoint holds no checkpoint", "expected the folder of a run"],
    ),
    "export of nothing to nowhere": (["export", "{root}/run"], ["export needs a file to write", "--onnx OUT.onnx"]),
    "the second of two exports has a wrong ending": (
        ["export", "{root}/run", "{root}/e.pth", "--pose", "{root}/p.pth"],
        ["{root}/p.pth", ".safetensors"],
    ),
    "an export over its own source": (
        ["export", "{root}/run/" + STEP, "{root}/run/../run/" + STEP, "--force"],
        ["is named twice"],
    ),
    "an index of tar files from a configuration": (
        ["pack", "--index", "--set", "data.root={root}/hands", "{root}/images"],
        ["--index takes OUT and --force alone", "tar files as they are"],
    ),
    "tar files to an address": (
        ["pack", "--set", "data.root={root}/hands", "s3://bucket/hands"],
        ["s3://bucket/hands is an address"],
    ),
    "convert from a device": (["convert", "/dev/zero", "{root}/new.pth"], ["'/dev/zero' is no file", "expected"]),
}


@pytest.mark.parametrize("case", WRONG)
def test_every_mistake_ends_in_one_line(case: str, root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments, fragments = WRONG[case]
    before = snapshot(root)
    error = refusal(capsys, *(word.format(root=root) for word in arguments))
    assert error.startswith("error: ")
    assert "Traceback" not in error
    for fragment in fragments:
        assert fragment.format(root=root) in error
    assert snapshot(root) == before


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"RANK": "1"}, "rank = 1 and world_size = 1 (RANK and WORLD_SIZE in the environment)"),
        ({"RANK": "1", "WORLD_SIZE": "2"}, "MASTER_ADDR is not set: expected where rank 0 is"),
        ({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "0"}, "LOCAL_WORLD_SIZE = '0': expected a number"),
        ({"RANK": "abc"}, "RANK = 'abc': expected a number"),
        (
            {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1"},
            "train.batch = 12 holds 3 micro-batches of 4 images, fewer than the 4 ranks: start fewer processes",
        ),
    ],
)
def test_a_wrong_environment_is_one_line_before_any_rank_waits(
    environment: dict[str, str],
    message: str,
    root: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.distributed, "init_process_group", lambda *a, **k: pytest.fail("waits for other ranks"))
    assert f"error: {message}" in refusal(capsys, *(word.format(root=root) for word in pretrain()))
    assert not (root / "out").exists()
