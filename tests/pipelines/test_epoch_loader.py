"""`make_loader`: an epoch for each `for`, a state that any number of ranks loads, and no side effects."""

from __future__ import annotations

import itertools
import json
import pickle
import re
import subprocess
import sys
import threading
from dataclasses import replace
from itertools import islice
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch

from peclr_dali import (
    AppearanceConfig,
    Batch,
    ColourConfig,
    DataConfig,
    EpochLoader,
    GeometryConfig,
    Index,
    PipelinesConfig,
    UserError,
    make_loader,
)
from peclr_dali.pipelines.loader.loader import Loader
from peclr_dali.pipelines.samples.order import build_order
from tests.pipelines.harness import (
    RENDERERS,
    SMALL,
    RendererName,
    assert_equal,
    assert_equal_views,
    index_of,
    join_ranks,
    load,
    write_jpegs,
)

pytestmark = pytest.mark.usefixtures("without_torchrun")

ROOT = Path(__file__).parents[2]
FEW_THREADS = PipelinesConfig(threads=2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """26 pictures: an epoch of 4 batches of 6."""
    return Path(write_jpegs(tmp_path_factory.mktemp("images"), 26).root)


def small_loader(
    data: Path | str | Index | DataConfig, rank: int = 0, world_size: int = 1, **changed: Any
) -> EpochLoader:
    settings: dict[str, Any] = {"batch": 6, "geometry": SMALL.geometry, "config": FEW_THREADS, "device": "cpu"}
    return make_loader(data, rank=rank, world_size=world_size, seed=3, **settings | changed)


def positions(batches: list[Batch]) -> list[int]:
    return torch.cat([batch.positions for batch in batches]).tolist()


def test_epochs_are_those_of_the_loader(folder: Path) -> None:
    index = index_of(folder)
    of_numpy: dict[str, Any] = {"batch": np.uint8(6), "seed": np.uint64(2**62 + 5)}
    with make_loader(index, **of_numpy, device="cpu") as loader:
        loader.set_epoch(of_numpy["batch"])
        assert json.dumps(loader.state_dict())  # no NumPy's numbers, which would be rounded
        assert loader.state_dict()["seed"] == 2**62 + 5
    expected = load(index, batch=6, order=build_order(index, batch=6, seed=3), last=8)
    with small_loader(str(folder)) as ours, small_loader(index) as same:
        assert len(ours) == 4
        made = [*ours, *ours]
        assert ours.index.paths == index.paths
        list(islice(same, 1))
    assert len(made) == 8
    assert_equal(made, expected)
    with small_loader(DataConfig(source="folder", root=str(folder)), views=3) as three:
        assert [len(batch.views) for batch in islice(three, 2)] == [3, 3]


@pytest.mark.parametrize("renderer", RENDERERS)
def test_views_of_one_decode_have_the_bits_of_a_loader_for_each_kind(renderer: RendererName, folder: Path) -> None:
    """Two sizes, all kinds of colour jitter, with and without halving: each view as if all were of its kind."""
    large = GeometryConfig(side_px=48, scale=(1, 2), flip_probability=0.5)
    small = GeometryConfig(side_px=16, scale=(0.5, 1.5), crop_probability=0.5)
    geometry = [large, large, small, replace(small, antialias=False), small]
    colour = [ColourConfig(jitter="none" if number in (1, 2) else "hsv") for number in range(5)]
    appearance = [AppearanceConfig(colour_drop_probability=0.5), *[AppearanceConfig(noise_probability=0.5)] * 4]
    config = PipelinesConfig(threads=2, views=renderer)
    with small_loader(folder, geometry=geometry, colour=colour, appearance=appearance, config=config) as loader:
        made = take(loader, 2)
    assert [view.image.shape[2:] for view in made[0].views] == [(48, 48)] * 2 + [(16, 16)] * 3
    for number, kind in enumerate(zip(geometry, colour, appearance, strict=True)):
        tables: dict[str, Any] = dict(zip(("geometry", "colour", "appearance"), kind, strict=True))
        with small_loader(folder, views=5, config=config, **tables) as loader:
            ours, theirs = ([batch.views[number] for batch in batches] for batches in (made, take(loader, 2)))
        assert_equal_views(ours, theirs, within=0, mean=1)


def test_keypoints_are_in_pixels_of_each_view(folder: Path) -> None:
    keypoints_px = np.random.default_rng(0).uniform(0, 56, (26, 21, 2)).astype(np.float32)
    keypoints_px[3, 4] = np.nan
    index = replace(index_of(folder), keypoints_px=keypoints_px)
    with small_loader(index, geometry=[GeometryConfig(32, flip_probability=1), GeometryConfig(16)]) as loader:
        for batch in loader:
            for number, view in enumerate(batch.to("cpu").views):
                linear, shift_px = np.split(view.source_to_view_px.double().numpy(), [2], axis=2)
                expected = keypoints_px[batch.samples[:, 0].numpy()] @ linear.swapaxes(1, 2) + shift_px.swapaxes(1, 2)
                np.testing.assert_allclose(batch.keypoints_px(number).numpy(), expected, atol=1e-3)
    with small_loader(folder) as loader, pytest.raises(UserError, match="the batch has no keypoints"):
        take(loader, 1)[0].keypoints_px(0)


def test_a_for_that_is_left_early_ends_its_epoch(folder: Path) -> None:
    with small_loader(folder) as loader:
        with pytest.raises(TypeError, match="call make_loader there"):
            pickle.dumps(loader)  # as spawn, forkserver and the workers of a DataLoader send their arguments
        assert iter(loader) is not iter(loader)  # which alone moves nothing
        assert positions(list(islice(loader, 1))) == list(range(6))
        assert loader.epoch == 0
        assert positions(list(loader)) == list(range(24, 48))
        assert loader.epoch == 2
        assert positions(list(islice(loader, 4))) == list(range(48, 72))  # all of it, though its end was not seen
        assert positions(list(islice(loader, 1))) == list(range(72, 78))


def test_the_epoch_can_be_set_and_a_change_of_the_position_ends_a_running_for(folder: Path) -> None:
    with small_loader(folder) as loader:
        with pytest.raises(UserError, match="epoch = -1: expected a whole number from 0 to"):
            loader.set_epoch(-1)
        assert loader.epoch == 0
        for _ in range(2):
            loader.set_epoch(2)
            assert positions(list(islice(loader, 2))) == list(range(48, 60))
        loader.sampler.set_epoch(0)
        assert positions(list(loader)) == list(range(24))
        loader.set_epoch(1)
        assert positions(list(loader)) == list(range(24, 48))
        under_way = iter(loader)
        next(under_way)
        loader.set_epoch(1)
        with pytest.raises(RuntimeError, match="position has changed since this batch"):
            next(under_way)
        first, second = iter(loader), iter(loader)
        assert positions([next(first)])[0] == 24
        assert positions([next(second)])[0] == 48
        with pytest.raises(RuntimeError, match="position has changed since this batch"):
            next(first)


def take(loader: EpochLoader, steps: int) -> list[Batch]:
    """So many batches, over as many epochs as it takes."""
    taken: list[Batch] = []
    while len(taken) < steps:
        taken += islice(loader, steps - len(taken))
    return taken


@pytest.mark.parametrize(("steps", "ranks"), [(0, 3), (1, 2), (3, 3), (4, 4), (5, 1), (8, 5)])
def test_a_state_is_resumed_on_another_number_of_ranks(folder: Path, steps: int, ranks: int) -> None:
    with small_loader(folder) as loader:
        whole = take(loader, 11)
    before, states = [], []
    for rank in range(2):
        with small_loader(folder, rank, 2) as loader:
            before.append(take(loader, steps))
            states.append(loader.state_dict())  # batches that were made ahead do not count
    assert states[0] == states[1] == {"position": 6 * steps, "batch": 6, "seed": 3, "images": [26]}
    after = []
    for rank in range(ranks):
        with small_loader(folder, rank, ranks) as loader:
            loader.load_state_dict(states[0])
            loader.set_epoch(steps // 4)  # as frameworks do before each epoch
            after.append(take(loader, 11 - steps))
    made = join_ranks(before) + join_ranks(after)
    assert len(made) == 11
    assert_equal(made, whole)


@pytest.mark.parametrize(
    "changed",
    [{"seed": 4}, {"batch": 5}, {"images": [25]}, *({"position": at} for at in (7, "x", None, -6, 6 * 2**70))],
)
def test_a_state_that_does_not_fit_is_refused(folder: Path, changed: dict[str, Any]) -> None:
    with small_loader(folder) as loader:
        with pytest.raises(UserError, match=next(iter(changed))):
            loader.load_state_dict(loader.state_dict() | changed)
        assert loader.epoch == 0


def test_ranks_come_from_the_environment_and_share_the_cores(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    threads = []

    class Seen(Loader):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            threads.append(self.settings.threads)

    monkeypatch.setattr("peclr_dali.pipelines.loader.loader.Loader", Seen)
    monkeypatch.setattr("peclr_dali.pipelines.render.settings.available_cores", lambda: 6)
    for name, number in {"RANK": 1, "WORLD_SIZE": 3, "LOCAL_RANK": 1, "LOCAL_WORLD_SIZE": 3}.items():
        monkeypatch.setenv(name, str(number))
    with make_loader(folder, batch=6, geometry=SMALL.geometry, device="cpu") as loader:
        assert positions(take(loader, 1)) == [2, 3]
    assert threads == [2]
    with small_loader(folder, 2, 6) as loader:  # what is given goes first
        assert positions(take(loader, 1)) == [2]
    for rank, share in enumerate(([0, 1, 2, 3], [4, 5], [6, 7])):  # of four micro-batches, two are rank 0's
        with small_loader(folder, rank, 3, batch=8, micro_batch=2) as loader:
            assert positions(take(loader, 1)) == share
    monkeypatch.delenv("RANK")
    with pytest.raises(UserError, match=r"rank = 0 and world_size = 3 \(RANK and WORLD_SIZE in the environment\)"):
        make_loader(folder, batch=6)


@pytest.mark.parametrize(
    "given",
    [{"rank": 1}, {"rank": 2, "world_size": 2}, {"batch": 2, "rank": 0, "world_size": 3}, {"batch": True}, {"batch": 0},
     {"batch": 27}, {"batch": 2.5}, {"views": 0}, {"views": 257}, {"geometry": []}, {"seed": -1}, {"seed": 2**63},
     {"views": 2, "colour": [ColourConfig()]}, {"geometry": [GeometryConfig(fill=0), GeometryConfig(fill="edge")]},
     {"config": {"threads": 1}}, {"device": "gpu0"}, {"device": "meta"}, {"device": "cuda:77"}, {"data": []},
     {"data": ""}, {"data": 5}, {"micro_batch": 0}, {"micro_batch": 4}, {"micro_batch": 3, "rank": 0, "world_size": 3}],
)  # fmt: skip
def test_arguments_that_do_not_fit_are_refused(folder: Path, given: dict[str, Any]) -> None:
    arguments: dict[str, Any] = {"data": folder, "batch": 6, **given}
    with pytest.raises(UserError, match=next(iter(given))):
        make_loader(**arguments)


@pytest.mark.slow
def test_a_forked_process_is_told_to_make_its_own_loader(folder: Path) -> None:
    """The loader's threads stay in the first process; waiting for their batches would never end."""
    program = f"""
import os
from peclr_dali import PipelinesConfig, make_loader
loader = make_loader({str(folder)!r}, batch=6, device="cpu", config=PipelinesConfig(threads=2))
batches = iter(loader)
next(batches)
if (child := os.fork()) == 0:
    try:
        next(batches)
    except RuntimeError as error:
        print(error)
    loader.close()
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
assert len(list(batches)) == len(loader) - 1
"""
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=300)
    assert re.fullmatch(r"the loader belongs to process \d+, .* make a loader in each process, .*\n", done.stdout)


def interrupted(loader: EpochLoader, at: int) -> list[Batch]:
    """The batches that a loop received until Ctrl-C came on line `at` of those that make a batch."""
    received: list[Batch] = []
    lines = itertools.count()

    def trace(frame: FrameType, event: str, _: object) -> Any:
        if frame.f_code not in (EpochLoader._next.__code__, Batch.to.__code__):
            return None
        if event == "line" and next(lines) == at:
            raise KeyboardInterrupt
        return trace

    sys.settrace(trace)
    try:
        with pytest.raises(KeyboardInterrupt):
            received.extend(loader)
    finally:
        sys.settrace(None)
    return received


def test_after_ctrl_c_the_state_counts_what_the_loop_has_received(folder: Path) -> None:
    """Wherever it comes; and the loader continues there."""
    found = set()
    for at in range(0, 40, 2):
        with small_loader(folder) as loader:
            found.add(count := len(interrupted(loader, at)))
            state = loader.state_dict()
            assert state["position"] == 6 * count, at
            for _ in range(2):  # also back
                loader.load_state_dict(state)
                assert positions(take(loader, 1)) == list(range(6 * count, 6 * count + 6)), at
    assert {0, 1, 2} <= found


def test_a_loader_without_references_stops(folder: Path) -> None:
    """Whichever thread collects it, one of its own included, which could not wait for itself."""
    for collect_in_thread in (False, True):
        before = threading.enumerate()
        loader = small_loader(folder)
        take(loader, 1)
        working = [thread for thread in threading.enumerate() if thread.name == "loader" and thread not in before]
        assert len(working) == 1
        held = [loader]
        del loader
        if collect_in_thread:
            thread = threading.Thread(target=held.clear)
            thread.start()
            thread.join()
        else:
            held.clear()
        working[0].join(timeout=60)
        assert not working[0].is_alive()


_SCRIPT = """
import os, signal, sys
import peclr_dali, peclr_dali.pipelines.config, peclr_dali.pipelines.views.augmentation
assert not {"torch", "nvidia", "numba", "cv2"} & sys.modules.keys(), "importing pipelines is not cheap"
import cv2, numba, nvidia.dali, torch  # OpenCV changes the environment
environment = dict(os.environ)
threads, handlers = torch.get_num_threads(), [signal.getsignal(number) for number in (2, 15)]
loader = peclr_dali.make_loader(sys.argv[1], batch=6, geometry=peclr_dali.GeometryConfig(side_px=16), device="cpu")
for batch in loader:
    break
assert torch.get_num_threads() == threads
assert [signal.getsignal(number) for number in (2, 15)] == handlers
changed = {name for name in environment | os.environ if environment.get(name) != os.environ.get(name)}
assert not changed, changed
assert "triton" not in sys.modules, "only a GPU needs it"
print("leaves without closing it")
"""


@pytest.mark.slow
def test_the_loader_does_not_change_the_process(folder: Path) -> None:
    """It also ends though nobody closed the loader."""
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT, str(folder)], cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "leaves without closing it\n", "")
