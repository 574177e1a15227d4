import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

torch.set_num_threads(1)  # tests run side by side; one thread each also makes sums reproducible

Record = Callable[..., None]

RESULTS = Path(__file__).parents[1] / "bench" / "results"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record", action="store_true", help="append what the proofs found to --record-to")
    parser.addoption("--record-to", type=Path, default=RESULTS, help="a folder of rows, by default bench/results/")


@pytest.fixture
def record(request: pytest.FixtureRequest) -> Record:
    """`record(name, **figures)` appends a row to bench/results/NAME.jsonl, if --record asks for it."""

    def write(name: str, **figures: Any) -> None:
        if request.config.getoption("--record"):
            from peclr_dali.bench.rows import append, describe_machine

            file = request.config.getoption("--record-to") / f"{name}.jsonl"
            append(file, {"bench": name, "machine": describe_machine(), **figures})

    return write


@pytest.fixture
def without_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    """However these tests were started."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def logging_set_back() -> Iterator[None]:
    """The root logger is as before after the test."""
    root = logging.getLogger()
    level, handlers = root.level, root.handlers[:]
    yield
    root.setLevel(level)
    root.handlers[:] = handlers


_LONGEST = (
    "test_finetune.py", "test_pretrain.py", "test_all_ranks.py", "test_predict.py",
    "test_export.py", "test_exif.py", "test_check_data.py", "test_views.py", "test_mutated_files.py",
    "test_shards.py", "test_compiled.py", "test_one_run_per_folder.py", "test_report.py",
)  # fmt: skip
"""Files whose tests take long begin first: a worker runs a whole file, and the others would wait at the end."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: _LONGEST.index(item.path.name) if item.path.name in _LONGEST else len(_LONGEST))
    for item in items:
        if item.get_closest_marker("gpu") is None:
            continue
        if torch.cuda.is_available():  # maybe with newer libraries than the lock's, which warn of each other
            item.add_marker(pytest.mark.filterwarnings("default::DeprecationWarning", "default::FutureWarning"))
        else:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
