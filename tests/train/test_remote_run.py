"""Fine-tuning and evaluation on shards at an address: the same weights and metrics as from a folder."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from s3fs import S3FileSystem  # type: ignore[import-untyped]

from peclr_dali.pipelines.config import DataConfig
from peclr_dali.pipelines.sources import load_index
from peclr_dali.pipelines.sources.shards.pack import pack
from peclr_dali.train.config.finetuning import FinetuneConfig
from peclr_dali.train.config.load import load_config
from peclr_dali.train.evaluation.evaluate import evaluate
from peclr_dali.train.finetune import finetune
from tests.pipelines.sources.bucket import ADDRESS, Bucket
from tests.train import tiny_hands

pytestmark = pytest.mark.usefixtures("narrow")


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five shards of ten hands with their labels."""
    root = tmp_path_factory.mktemp("hands")
    tiny_hands.write_hands(root / "data", 12)
    pack(load_index(DataConfig("freihand", str(root / "data"))), root / "packed", per_tar=10, workers=1)
    return root / "packed"


@pytest.fixture
def bucket(packed: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    with closing(Bucket(packed)) as started:
        S3FileSystem.clear_instance_cache()
        for name, value in started.environment.items():
            monkeypatch.setenv(name, value)
        yield started


def test_fine_tuning_and_evaluation_over_an_address(bucket: Bucket, packed: Path, tmp_path: Path) -> None:
    """Of the poses of the split that was packed with them: trained on one part, measured on the other."""
    weights: list[dict[str, torch.Tensor]] = []
    metrics: list[Any] = []
    for name, root in (("remote", ADDRESS), ("local", str(packed))):
        settings = ("train.epochs=1", "data.source=shards", f"data.root={root}")
        out = tmp_path / name
        finetune(load_config(FinetuneConfig, [], [*tiny_hands.TINY, *settings, f"run.out={out}"]))
        newest = max((out / "checkpoints").glob("step_*.pt"))
        weights.append(torch.load(newest, weights_only=True)["network"])
        evaluate(
            out, [], [], out=None, compare=None, crop="boxes", worst=3, submission=False, proper_rotation=False
        )  # fmt: skip
        metrics.append(json.loads((out / "evaluation" / "metrics.json").read_text())["metrics"])
    assert all(torch.equal(one, weights[1][name]) for name, one in weights[0].items())
    assert metrics[0] == metrics[1]
    assert sum(count for name, count in bucket.requests.items() if name.endswith(".tar")) > 5
