"""`make_loader` and `ExactStep` together on ranks that do not divide the batch evenly."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from peclr_dali import Batch, ExactStep, GeometryConfig, PipelinesConfig, described_world, joined, make_loader
from tests.pipelines.harness import write_jpegs
from tests.train import ranks
from tests.train.tiny_step import assert_same, buffers, gradients, network, spread, to_double

BATCH, MICRO_BATCH, RANKS = 8, 2, 3  # four micro-batches: 2, 1, 1


def one_rank(images: str, out: str) -> None:
    """The second step of an epoch: the gradient, the statistics and this rank's images, into a file."""
    world = described_world("cpu")
    model = network()

    def embed(batch: Batch, rows: slice) -> Tensor:
        embeddings: Tensor = model(to_double(torch.cat([view.image[rows] for view in batch.views])))
        return embeddings.view(2, -1, embeddings.shape[1])

    settings: dict[str, Any] = {"geometry": GeometryConfig(side_px=16), "config": PipelinesConfig(threads=1)}
    with (
        joined(world, 60.0),
        make_loader(images, batch=BATCH, micro_batch=MICRO_BATCH, device="cpu", **settings) as loader,
    ):
        step = ExactStep(model, embed, spread, batch=BATCH, micro_batch=MICRO_BATCH, world=world)
        for batch in loader:
            loss = step(batch).loss
    torch.save((loss, gradients(model), buffers(model), batch.positions), Path(out) / f"{world.rank}.pt")


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_jpegs(tmp_path_factory.mktemp("images"), 2 * BATCH).root)


def test_three_ranks_give_the_gradient_of_one(images: str, tmp_path: Path) -> None:
    outcomes = {}
    for count in (1, RANKS):
        out = tmp_path / str(count)
        out.mkdir()
        ranks.run_ranks(count, one_rank, images, str(out), log=out / "log")
        outcomes[count] = [torch.load(out / f"{rank}.pt") for rank in range(count)]
    ((loss, expected, statistics, positions),) = outcomes[1]
    assert [outcome[3].tolist() for outcome in outcomes[RANKS]] == [
        rows.tolist() for rows in positions.split([4, 2, 2])
    ]
    for their_loss, their_gradients, their_statistics, _ in outcomes[RANKS]:
        torch.testing.assert_close(their_loss, loss, atol=1e-12, rtol=0)
        assert_same(their_gradients, expected)
        assert_same(their_statistics, statistics)
