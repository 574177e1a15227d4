"""Bad files of a run: counted exactly, on any number of ranks and over a resume; too many of them end it."""

import json
import shutil
from collections import Counter
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch

from peclr_dali import Batch, DataConfig, UserError, World
from peclr_dali.pipelines.loader.prepare import SUBSTITUTE_ATTEMPTS
from peclr_dali.pipelines.samples.index import Index, join
from peclr_dali.pipelines.samples.order import EpochOrder
from peclr_dali.train.config.pretraining import Config
from peclr_dali.train.pretrain import pretrain
from peclr_dali.train.runs.bad_files import BadFiles
from peclr_dali.train.runs.folder import RunFolder
from peclr_dali.train.runs.run import Run
from tests.train import ranks, tiny_run

pytestmark = pytest.mark.usefixtures("narrow")

BAD = (7, 31)
NAMES = [f"{number:02}.jpg" for number in range(50)]


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tiny_run.write_images(tmp_path_factory.mktemp("data") / "images")
    (root / NAMES[7]).write_bytes(b"")
    data = (root / NAMES[31]).read_bytes()
    (root / NAMES[31]).write_bytes(data[: data.index(b"\xff\xda") + 40])
    return root


def expected(steps: int) -> Counter[int]:
    """How often each bad row is met in the first steps of 12, itself or as a substitute."""
    order = EpochOrder(len(NAMES), 48, seed=0)
    met: Counter[int] = Counter()
    for position in range(12 * steps):
        epoch, place = divmod(position, 48)
        tried = [int(order.samples(epoch, np.array([place]))[0]), *order.substitutes(epoch, place, SUBSTITUTE_ATTEMPTS)]
        for row in tried:
            if int(row) not in BAD:
                break
            met[int(row)] += 1
    return met


def quarantine(out: Path) -> dict[str, tuple[str, int]]:
    rows = [json.loads(line) for line in (out / "quarantine.jsonl").read_text().splitlines()]
    assert [row["met"] for row in rows] == sorted((row["met"] for row in rows), reverse=True)
    return {Path(row["path"]).name: (row["reason"], row["met"]) for row in rows}


@pytest.fixture(scope="module")
def stopped(images: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A run that too many bad files have ended."""
    out = tmp_path_factory.mktemp("run") / "out"
    with pytest.raises(UserError) as caught:
        pretrain(tiny_run.config_of(images, out))
    return out, str(caught.value)


def test_too_many_end_the_run_with_a_summary_and_a_checkpoint(stopped: tuple[Path, str], images: Path) -> None:
    out, message = stopped
    step = max(int(path.stem.removeprefix("step_")) for path in (out / "checkpoints").iterdir())
    met = expected(step)
    share = met.total() / (met.total() + 12 * step)
    assert met.total() > 0
    assert step % 2 == 0  # a log step
    name = f"{images.parent.name}/images"
    assert f"{share:.2%} of the images drawn from {name} up to step {step} cannot be used" in message
    assert "more than data.max_bad_share = 0.01" in message
    assert "--resume auto" in message
    assert len(message.splitlines()) == 1
    assert {name: times for name, (_, times) in quarantine(out).items()} == {NAMES[row]: met[row] for row in met}


def test_a_resumed_run_goes_on_counting(stopped: tuple[Path, str], images: Path, tmp_path: Path) -> None:
    out = Path(shutil.copytree(stopped[0], tmp_path / "out"))
    pretrain(tiny_run.config_of(images, out, "data.max_bad_share=0.5"), resume="auto")
    met = expected(tiny_run.STEPS)
    found = quarantine(out)
    assert {name: times for name, (_, times) in found.items()} == {NAMES[row]: met[row] for row in met}
    assert found[NAMES[7]][0] == "empty file"
    assert found[NAMES[31]][0].startswith("JPEG cut after")


def test_two_ranks_write_one_file(images: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    keys = ("train.micro_batch=6", "data.max_bad_share=0.5", "run.log_every=5", "run.checkpoint_every=7")
    ranks.run_ranks(2, ranks.pretrain, tiny_run.settings(images, out, *keys), log=tmp_path / "log")
    met = expected(tiny_run.STEPS)
    assert {name: times for name, (_, times) in quarantine(out).items()} == {NAMES[row]: met[row] for row in met}


def test_each_source_has_a_limit_of_its_own(tmp_path: Path) -> None:
    """A tenth of the second source is bad: its own limit decides, whatever the first one's is."""
    sources = [
        Index(name, tmp_path / name, [f"{row}.jpg" for row in range(50)], np.zeros((50, 3), np.float32))
        for name in ("tidy", "untidy")
    ]
    rows = torch.cat([torch.arange(20), 50 + torch.arange(18)])
    batch = Batch((), rows[:, None], torch.arange(len(rows)), torch.tensor([98, 98]))
    for limits, too_many in (((0.01, 0.2), False), ((0.2, 0.01), True)):
        data = tuple(DataConfig(max_bad_share=limit) for limit in limits)
        run = Run(Config(data=data), World(), RunFolder(tmp_path, keep=1))
        bad_files = BadFiles(run, join(sources, [1, 1]))
        bad_files.quarantine.add(98, "48.jpg", "empty file")
        bad_files.count(batch, step=run.config.run.log_every)
        assert bad_files.too_many is too_many
        message = r"10\.00% of .* untidy.*data\.1\.max_bad_share = 0\.01; .*quarantine\.jsonl says"
        with pytest.raises(UserError, match=message) if too_many else nullcontext():
            bad_files.require_few(7)
