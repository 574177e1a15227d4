import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from peclr_dali.models.nt_xent import TILE_ELEMENTS, NTXent
from tests.conftest import Record


def nt_xent(first: Tensor, second: Tensor, temperature: float = 0.5) -> Tensor:
    return NTXent(temperature=temperature)(torch.stack([first, second]))


def naive(first: Tensor, second: Tensor, temperature: float) -> float:
    """Eq. 1 of the paper, anchor by anchor."""
    z = [*first.double(), *second.double()]
    samples = len(first)
    total = 0.0
    for i in range(2 * samples):
        similarity = [float(F.cosine_similarity(z[i], other, dim=0)) / temperature for other in z]
        denominator = sum(math.exp(s) for k, s in enumerate(similarity) if k != i)
        total -= math.log(math.exp(similarity[(i + samples) % (2 * samples)]) / denominator)
    return total / (2 * samples)


def pair(samples: int, dim: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    first, second = torch.randn(2, samples, dim, generator=generator, dtype=dtype)
    return first, second


@pytest.mark.parametrize("temperature", [0.1, 0.5, 2.0])
@pytest.mark.parametrize("samples", [2, 3, 7])
def test_equals_the_naive_double_loop(samples: int, temperature: float) -> None:
    first, second = pair(samples, 6)
    assert nt_xent(first, second, temperature).item() == pytest.approx(naive(first, second, temperature), abs=1e-12)


SAME, BASIS = torch.ones(16, 4, dtype=torch.float64), torch.eye(32, dtype=torch.float64)


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        (SAME, SAME, math.log(31)),  # all identical: the logarithm of the number of others
        (BASIS[:2], BASIS[2:4], math.log(3)),  # all orthogonal: the positive is as far as the negatives
        (BASIS[:8], BASIS[8:16], math.log(15)),
        (BASIS[:2], BASIS[:2], math.log(1 + 2 * math.exp(-2))),  # aligned: positives equal, negatives orthogonal
        (BASIS[:8], BASIS[:8], math.log(1 + 14 * math.exp(-2))),
        (BASIS[:4], -BASIS[:4], math.log(math.exp(-2) + 6) + 2),  # opposite positives
    ],
)
def test_closed_forms(first: Tensor, second: Tensor, expected: float) -> None:
    assert nt_xent(first, second).item() == pytest.approx(expected, abs=1e-14)


def test_one_sample_is_refused() -> None:
    """Its loss would be 0, whatever the embeddings."""
    with pytest.raises(ValueError, match=r"of 1 samples: .* of two samples or more"):
        nt_xent(SAME[:1], SAME[:1])


def test_cold_temperature_neither_overflows_nor_underflows() -> None:
    first, second = pair(8, 4, dtype=torch.float32)
    loss = nt_xent(first.requires_grad_(), second, temperature=1e-4)
    (gradient,) = torch.autograd.grad(loss, first)
    assert loss.isfinite()
    assert gradient.isfinite().all()


def test_gradient() -> None:
    first, second = pair(3, 4)
    assert torch.autograd.gradcheck(nt_xent, (first.requires_grad_(), second.requires_grad_()))
    with pytest.raises(NotImplementedError, match="no second derivatives"):
        torch.autograd.grad(nt_xent(first, second), first, create_graph=True)


@settings(deadline=None, max_examples=30)
@given(st.integers(2, 6), st.integers(2, 5), st.integers(0, 1000))
def test_invariances(samples: int, dim: int, seed: int) -> None:
    first, second = pair(samples, dim, seed)
    generator = torch.Generator().manual_seed(seed + 1)
    loss = nt_xent(first, second)

    order = torch.randperm(samples, generator=generator)
    rotation, _ = torch.linalg.qr(torch.randn(dim, dim, generator=generator, dtype=torch.float64))
    length = torch.rand(samples, 1, generator=generator, dtype=torch.float64) + 0.1
    for changed in (
        nt_xent(second, first),
        NTXent()(torch.stack([first, second], dim=1).transpose(0, 1)),
        nt_xent(first[order], second[order]),
        nt_xent(first @ rotation, second @ rotation),
        nt_xent(first * length, second),
    ):
        torch.testing.assert_close(changed, loss, atol=1e-12, rtol=0)


def untiled(embeddings: Tensor, rows: range, temperature: float) -> Tensor:
    """The whole matrix at once, with autograd's own gradient."""
    _, samples, dim = embeddings.shape
    unit = F.normalize(embeddings, dim=2)
    logits = unit[:, rows.start : rows.stop].reshape(-1, dim) @ unit.view(-1, dim).T / temperature
    sample = torch.arange(rows.start, rows.stop)
    itself, positive = torch.cat([sample, sample + samples]), torch.cat([sample + samples, sample])
    logits = logits.scatter(1, itself[:, None], float("-inf"))
    return F.cross_entropy(logits, positive, reduction="sum") / (2 * samples)


@pytest.mark.parametrize("elements", [1, 30, 100, 10**6])  # strips of 1, 1, 3 and all rows of 29 columns or more
@pytest.mark.parametrize("rows", [range(0, 15), range(4, 11), range(14, 15)])
def test_tiles_change_nothing(elements: int, rows: range, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("peclr_dali.models.nt_xent.TILE_ELEMENTS", elements)
    embeddings = torch.stack(pair(15, 4)).requires_grad_()
    expected, loss = untiled(embeddings, rows, 0.1), NTXent(temperature=0.1).share(embeddings, rows)
    torch.testing.assert_close(loss, expected, atol=1e-13, rtol=0)
    theirs, ours = (torch.autograd.grad(3 * value, embeddings)[0] for value in (expected, loss))
    torch.testing.assert_close(ours, theirs, atol=1e-13, rtol=0)


PEAK_BYTES = """
import re, torch
from pathlib import Path
from typing import Any
from peclr_dali.models.nt_xent import NTXent
torch.manual_seed(0)
few, embeddings = (torch.randn(2, samples, {dim}, requires_grad=True) for samples in (64, {samples}))
NTXent().share(few, range(64)).backward()  # what torch itself takes at its first call
Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here
memory = lambda name: int(re.search(name + r":\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1])
before = memory("VmRSS")
NTXent().share(embeddings, range({rows})).backward()
print((memory("VmHWM") - before) * 1024)
"""
"""A process of its own; getrusage would count its parent's peak, too."""
TILE_BYTES = 4 * TILE_ELEMENTS


def test_never_more_than_a_tile_of_similarities_in_memory() -> None:
    """1024 anchors of 32,768 embeddings have 2 x 2^25 similarities: four tiles."""
    assert peak_bytes(samples=16384, dim=8, rows=1024) < 1.5 * TILE_BYTES


@pytest.mark.slow  # minutes: 2^31 similarities
def test_a_global_batch_of_131072_embeddings(record: Record) -> None:
    """One of eight ranks: its rows of the matrix would take 8 GiB, and what autograd keeps of them more."""
    sizes = {"samples": 65536, "dim": 128, "rows": 8192}
    embeddings_bytes, rows_bytes = 4 * 2 * 65536 * 128, 4 * 2 * 8192 * 2 * 65536
    peak = peak_bytes(**sizes)
    record(
        "loss_memory", embeddings=131072, **sizes, peak_bytes=peak, tile_bytes=TILE_BYTES,
        embeddings_bytes=embeddings_bytes, rows_of_the_matrix_bytes=rows_bytes,
    )  # fmt: skip
    assert peak < TILE_BYTES + 6 * embeddings_bytes < rows_bytes / 15


def peak_bytes(**sizes: int) -> int:
    """By how much the loss and its gradient raise the memory of a process that holds the embeddings."""
    done = subprocess.run(
        [sys.executable, "-c", PEAK_BYTES.format(**sizes)], cwd=Path(__file__).parents[3],
        capture_output=True, text=True, timeout=900,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_is_computed_in_float32_under_autocast(dtype: torch.dtype) -> None:
    first, second = pair(16, 8, dtype=torch.float32)
    first, second = first.to(dtype), second.to(dtype)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = nt_xent(first, second)
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(naive(first, second, 0.5), abs=2e-6)
    assert nt_xent(first.double(), second.double()).dtype == torch.float64
