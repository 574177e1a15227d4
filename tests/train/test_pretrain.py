"""Whole runs: killed and resumed, on any number of processes, and with a loss that a program brings along."""

import os
import random
import re
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from peclr_dali import NTXent, UserError
from peclr_dali.train.config.load import load_config
from peclr_dali.train.config.pretraining import Config
from peclr_dali.train.pretrain import has_recorded_settings, pretrain
from tests.conftest import Record
from tests.train import ranks, tiny_run
from tests.train.narrow import narrow_resnet18

Pretrain = Callable[[Sequence[str]], None]


def start(
    images: Path,
    out: Path,
    *overrides: str,
    world_size: int = 1,
    pretrain: Pretrain = ranks.pretrain_slowly,
) -> list[BaseProcess]:
    """A run that can be killed or stopped before it ends."""
    settings = tiny_run.settings(images, out, *overrides)
    return ranks.start_ranks(world_size, pretrain, settings, log=out.with_suffix(".log"))


def run(images: Path, out: Path, *overrides: str, world_size: int = 1, code: int = 0) -> str:
    """What the run printed."""
    settings = tiny_run.settings(images, out, *overrides)
    return ranks.run_ranks(world_size, ranks.pretrain, settings, log=out.with_suffix(".log"), code=code)


@pytest.fixture(scope="module")
def uninterrupted(images: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run folder of a run that nothing disturbed."""
    out = tmp_path_factory.mktemp("runs") / "whole"
    run(images, out)
    return out


def assert_same_weights(one: Path, other: Path) -> None:
    torch.testing.assert_close(tiny_run.final_weights(one), tiny_run.final_weights(other), rtol=0, atol=0)


def test_a_run_folder_holds_all_its_files(uninterrupted: Path) -> None:
    names = {path.name for path in uninterrupted.iterdir()}
    assert names >= {"config.toml", "versions.json", "metrics.jsonl", "checkpoints", "tensorboard"}
    assert names >= {"views.png", "loss.png"}
    rows = tiny_run.rows_of(uninterrupted)
    assert [row["step"] for row in rows] == [2, 4, 6, 8, 10, 12]
    assert {"loss", "lr", "images_per_s", "wait_share", "alignment", "uniformity", "positive_rank"} <= rows[0].keys()
    assert len(list((uninterrupted / "checkpoints").iterdir())) == 3
    samples = tiny_run.samples_of_steps(uninterrupted)
    for epoch in range(3):
        assert len({sample for step in range(4 * epoch + 1, 4 * epoch + 5) for sample in samples[step]}) == 48


def test_killed_at_a_random_step_and_resumed_the_weights_are_the_same_bits(
    images: Path, uninterrupted: Path, tmp_path: Path
) -> None:
    out, target = tmp_path / "killed", random.Random(os.urandom(8)).randrange(1, 9)
    processes = start(images, out)
    ranks.wait_for_steps(processes[0], out, target)
    assert processes[0].is_alive(), out.with_suffix(".log").read_text()
    ranks.kill(processes)
    run(images, out)
    assert_same_weights(uninterrupted, out)
    assert tiny_run.samples_of_steps(out) == tiny_run.samples_of_steps(uninterrupted)
    assert [row["step"] for row in tiny_run.rows_of(out)] == [2, 4, 6, 8, 10, 12]


@pytest.mark.parametrize("world_size", [1, 2])
def test_sigterm_saves_and_ends_the_run(world_size: int, images: Path, uninterrupted: Path, tmp_path: Path) -> None:
    """With several ranks it is enough to ask one of them."""
    out = tmp_path / "stopped"
    processes = start(images, out, "run.log_every=100", world_size=world_size)
    ranks.wait_for_steps(processes[0], out, 1)
    processes[-1].terminate()
    output = ranks.finish(processes, out.with_suffix(".log"), code=128 + signal.SIGTERM)
    step, *others = re.findall(r"stopped by SIGTERM after step (\d+)", output)
    assert others == [step] * (world_size - 1)  # each rank has its line
    assert (out / "checkpoints" / f"step_{int(step):09d}.pt").exists()
    assert "Traceback" not in output
    if world_size == 1:
        run(images, out)
        assert_same_weights(uninterrupted, out)


@pytest.mark.parametrize(
    ("pretrain", "world_sizes"),
    [
        (ranks.pretrain, (1, 3)),
        pytest.param(ranks.pretrain_in_full, (1, 2, 3, 4), marks=pytest.mark.slow),  # ten ranks in turn
    ],
)
def test_any_number_of_processes_trains_the_same_run(
    pretrain: Pretrain, world_sizes: Sequence[int], images: Path, tmp_path: Path, record: Record
) -> None:
    """20 steps in float64, batch norm in train mode; four micro-batches, so that three ranks have unequal shares."""
    # The projector's first bias stands before batch norm: its gradient is rounding, which Adam enlarges: with three
    # images in a micro-batch, to 1e-9 of it.
    settings = (
        "train.precision=fp64", "train.epochs=10", "train.batch=24", "train.micro_batch=6", "run.checkpoint_every=1000",
    )  # fmt: skip
    for world_size in world_sizes:
        words = tiny_run.settings(images, tmp_path / str(world_size), *settings)
        ranks.run_ranks(world_size, pretrain, words, log=tmp_path / f"{world_size}.log")
        assert len(list((tmp_path / str(world_size)).glob("samples-rank*.jsonl"))) == world_size
    alone, samples = tiny_run.final_weights(tmp_path / "1", 20), tiny_run.samples_of_steps(tmp_path / "1")
    assert len(samples) == 20
    differences = {}
    for world_size in world_sizes[1:]:
        assert tiny_run.samples_of_steps(tmp_path / str(world_size)) == samples
        weights = tiny_run.final_weights(tmp_path / str(world_size), 20)
        assert weights.keys() == alone.keys()
        relative = {name: float((weights[name] - one).abs().max() / one.abs().max()) for name, one in alone.items()}
        worst = max(relative, key=relative.__getitem__)
        assert relative[worst] <= 1e-9, worst
        differences[world_size] = relative[worst]
    record("world_sizes", steps=20, precision="fp64", same_samples=True, largest_relative_difference=differences)


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_loss_that_is_not_finite_stops_the_run(world_size: int, images: Path, tmp_path: Path) -> None:
    output = run(images, tmp_path / "nan", "optim.lr=1e18", "optim.clip=false", world_size=world_size, code=2)
    assert output.count("last good checkpoint") == world_size
    assert "at step" in output
    assert "learning rate" in output
    assert "Traceback" not in output


def test_a_full_disk_stops_all_ranks_and_the_run_goes_on_when_there_is_room(
    images: Path, uninterrupted: Path, tmp_path: Path
) -> None:
    out = tmp_path / "full"
    settings = tiny_run.settings(images, out)
    output = ranks.run_ranks(2, _full_after_the_first_checkpoint, settings, str(out), log=tmp_path / "log", code=2)
    lines = [line for line in output.splitlines() if "error" in line]
    assert len(lines) == 2
    assert all("No space left on device" in line and "step_000000006.pt" in line for line in lines)
    assert "Traceback" not in output
    assert [path.name for path in (out / "checkpoints").iterdir()] == ["step_000000003.pt"]
    run(images, out)
    assert tiny_run.samples_of_steps(out) == tiny_run.samples_of_steps(uninterrupted)


def _full_after_the_first_checkpoint(settings: list[str], out: str) -> None:
    """/dev/full stands in for a file system without room: the kernel refuses what is written."""
    real_open = Path.open

    def open_(self: Path, mode: str = "r", *arguments: Any, **options: Any) -> Any:
        if self.match(f"{out}/checkpoints/step_000000006.pt.*part"):
            return real_open(Path("/dev/full"), "wb")
        return real_open(self, mode, *arguments, **options)

    Path.open = open_  # type: ignore[method-assign]
    ranks.pretrain(settings)


def distance(embeddings: Tensor) -> Tensor:
    """Mean squared distance of the two views on the unit sphere."""
    first, second = F.normalize(embeddings, dim=2)
    squared: Tensor = (first - second).square().sum(dim=1)
    return squared.mean()


@narrow_resnet18()
def test_a_loss_of_ones_own_trains(images: Path, tmp_path: Path) -> None:
    config = tiny_run.config_of(images, tmp_path / "run", "train.epochs=1")
    folder = pretrain(config, loss=distance)
    rows = folder.read_metrics()
    assert [row["step"] for row in rows] == [2, 4]
    for row in rows:
        assert row["loss"] == pytest.approx(row["alignment"], rel=1e-5)
    pretrain(config, "auto", loss=distance)  # has finished
    with pytest.raises(UserError, match=r"loss\.name: was 'distance', is now 'nt_xent'"):
        pretrain(config, "auto")
    with pytest.raises(UserError, match=r"loss\.name = 'distance': expected 'nt_xent'"):
        pretrain(load_config(Config, [folder.config_file], []), "auto")
    other = tiny_run.config_of(images, tmp_path / "other", "train.epochs=1")
    pretrain(other, loss=NTXent(temperature=0.5))
    with pytest.raises(UserError, match=r"was 'NTXent\(temperature=0.5\)', is now 'NTXent\(temperature=5.0\)'"):
        pretrain(other, "auto", loss=NTXent(temperature=5.0))


@narrow_resnet18()
def test_a_loss_whose_settings_are_not_recorded_is_told_once(
    images: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    weight = 0.5

    def scaled(embeddings: Tensor) -> Tensor:
        return distance(embeddings) * weight

    class Weighted(NTXent):  # whose `extra_repr` is that of a class without its setting
        def __init__(self, weight: float) -> None:
            super().__init__()
            self.weight = weight

    losses: list[Any] = [scaled, nn.Identity(), object(), NTXent().share, Weighted(2.0), distance, NTXent()]
    assert [has_recorded_settings(loss) for loss in losses] == [False] * 5 + [True] * 2
    pretrain(tiny_run.config_of(images, tmp_path / "run", "train.epochs=1"), loss=scaled)
    assert ["settings of the loss <function" in message for message in caplog.messages].count(True) == 1


@narrow_resnet18()
def test_a_row_of_metrics_waits_twice(images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For the loss, which decides on every rank if the run goes on, and for all other figures together."""
    reads: list[str] = []

    def recorded(name: str) -> Callable[[Tensor], Any]:
        read = getattr(torch.Tensor, name)

        def record(tensor: Tensor) -> Any:
            if tensor.is_floating_point():
                reads.append(name)
            return read(tensor)

        return record

    for name in ("item", "tolist"):
        monkeypatch.setattr(torch.Tensor, name, recorded(name))
    settings = ["train.epochs=1", "train.recompute=never", "run.log_every=1"]
    pretrain(tiny_run.config_of(images, tmp_path / "run", *settings))
    assert reads == ["item", "tolist"] * 4


# Four micro-batches, so that up to four ranks have work; a checkpoint after every step, so that kills meet its writing.
# A rank that is killed before the ranks have met is waited for until the time limit.
OF_KILLS = (
    "train.precision=fp64", "train.micro_batch=3", "run.checkpoint_every=1", "run.log_every=1", "run.keep=1",
    "run.rank_timeout_s=60",
)  # fmt: skip


def kill_at_random(folder: Path, pretrain: Pretrain, *, kills: int, epochs: int) -> dict[str, object]:
    """What was killed when, and how far the run ended from an undisturbed one."""
    steps, settings = 4 * epochs, (*OF_KILLS, f"train.epochs={epochs}")
    images, whole, killed = folder / "images", folder / "whole", folder / "killed"
    tiny_run.write_images(images)
    undisturbed_run = start(images, whole, *settings, "run.checkpoint_every=1000", pretrain=pretrain)
    ranks.finish(undisturbed_run, whole.with_suffix(".log"), timeout_s=900)
    seed = int.from_bytes(os.urandom(4))
    chance = random.Random(seed)
    said = f"seed {seed}"
    world_sizes, writing = [], 0
    for number in range(kills):
        world_size = chance.randint(1, 4)
        processes = start(images, killed, *settings, world_size=world_size, pretrain=pretrain)
        # From wherever it goes on, so that kills spread over the run however fast the machine is.
        target, extra_s = (number + 1) * steps // (kills + 4), chance.random() * 0.3
        victim = chance.choice([None, *range(world_size)])
        while processes[0].is_alive() and not (
            tiny_run.rows_of(killed) and tiny_run.rows_of(killed)[-1]["step"] >= target
        ):
            time.sleep(0.005)
        if number % 4 == 3:  # in the middle of a checkpoint
            victim, extra_s = None, 0.0
            while processes[0].is_alive() and not any((killed / "checkpoints").glob("*.part")):
                time.sleep(0.0005)
        time.sleep(extra_s)
        world_sizes.append(world_size)
        said += f"; {world_size} ranks, after step {target} + {extra_s:.2f} s, victim {victim}"
        assert processes[0].is_alive(), f"too late to be killed: {said}"
        if victim is None:  # power cut: all of them
            ranks.kill(processes)
        else:  # the others notice by themselves
            os.kill(processes[victim].pid or 0, signal.SIGKILL)
            for process in processes:
                process.join(300)
            assert not any(process.is_alive() for process in processes), said
        writing += any((killed / "checkpoints").glob("*.part"))  # half of one is left
    last = start(images, killed, *settings, world_size=chance.randint(1, 4), pretrain=pretrain)
    ranks.finish(last, killed.with_suffix(".log"), timeout_s=900)

    assert [row["step"] for row in tiny_run.rows_of(killed)] == list(range(1, steps + 1)), said
    loss, undisturbed = tiny_run.rows_of(killed)[-1]["loss"], tiny_run.rows_of(whole)[-1]["loss"]
    assert loss == pytest.approx(undisturbed, abs=1e-6), said
    assert tiny_run.samples_of_steps(killed) == tiny_run.samples_of_steps(whole), said
    ours, theirs = tiny_run.final_weights(killed, steps), tiny_run.final_weights(whole, steps)
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-8)
    return {
        "seed": seed,
        "steps": steps,
        "kills": kills,
        "kills_while_a_checkpoint_was_written": writing,
        "world_sizes": world_sizes,
        "final_loss": loss,
        "difference_from_undisturbed": abs(loss - undisturbed),
    }


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """In memory, if there is such a file system: a checkpoint of a quarter of a gigabyte after every step."""
    if not Path("/dev/shm").is_dir():
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        yield Path(name)


def test_killed_twice(folder: Path) -> None:
    kill_at_random(folder, ranks.pretrain_slowly, kills=2, epochs=1)


@pytest.mark.slow  # five minutes: 21 starts
def test_killed_twenty_times(folder: Path, record: Record) -> None:
    figures = kill_at_random(folder, ranks.pretrain_in_full, kills=20, epochs=6)
    record("kills", precision="fp64", **figures)
    assert cast(int, figures["kills_while_a_checkpoint_was_written"]) > 0, figures
