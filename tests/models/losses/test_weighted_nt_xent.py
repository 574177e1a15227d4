"""The weighted NT-Xent against SiMHand's formula, written densely with autograd's own gradient."""

from __future__ import annotations

import itertools
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from peclr_dali.models.losses.nt_xent import NTXent
from peclr_dali.models.losses.weighted_nt_xent import WeightedNTXent

SAMPLES, KEYPOINTS = 7, 21


def inputs(samples: int = SAMPLES) -> tuple[Tensor, Tensor]:
    """Embeddings (2, N, D) and keypoints (2, N, K, 2) of views of 128 pixels, pairs nearer than others."""
    generator = torch.Generator().manual_seed(samples)
    embeddings = torch.randn(2, samples, 6, generator=generator, dtype=torch.float64)
    hands = 128 * torch.rand(samples, KEYPOINTS, 2, generator=generator, dtype=torch.float64)
    moved = 9 * torch.rand(2, samples, 1, 1, generator=generator, dtype=torch.float64)
    return embeddings.requires_grad_(), hands + moved * torch.randn(hands.shape, generator=generator)


def distance(one: Tensor, other: Tensor) -> Tensor:
    return (one - other).square().sum(-1).sqrt().mean(-1)


def dense(embeddings: Tensor, keypoints: Tensor, loss: WeightedNTXent) -> Tensor:
    samples = embeddings.shape[1]
    z, joints = F.normalize(embeddings, dim=2).flatten(0, 1), keypoints.flatten(0, 1)
    pair_d, all_d = distance(*keypoints), distance(joints[:, None], joints)  # with each view and itself
    if loss.weights == "linear":
        pair_w, all_w = ((d.max() - d) / (d.max() - d.min()) for d in (pair_d, all_d))
    else:
        steepness = (loss.steepness_positives, loss.steepness_negatives)
        pair_w, all_w = (1 / (1 + (s * (d - d.mean())).exp()) for s, d in zip(steepness, (pair_d, all_d), strict=True))
    if loss.weighted == "negatives":
        pair_w = torch.ones_like(pair_w)
    if loss.weighted == "positives":
        all_w = torch.ones_like(all_w)
    others = (all_w * (z @ z.T) / loss.temperature).exp()[~torch.eye(2 * samples, dtype=torch.bool)]
    positive = (pair_w * (z[:samples] * z[samples:]).sum(1) / loss.temperature).exp()
    return -(torch.cat([positive, positive]) / others.view(2 * samples, -1).sum(1)).log().mean()


@pytest.mark.parametrize("weighted", ["both", "positives", "negatives"])
@pytest.mark.parametrize(("weights", "temperature"), [("linear", 0.5), ("sigmoid", 0.2)])
def test_equals_the_dense_formula_in_any_tiles_and_shares(
    weights: Any, temperature: float, weighted: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its gradient too: the weights are data, and no gradient goes through them."""
    loss = WeightedNTXent(temperature=temperature, weights=weights, weighted=weighted)
    embeddings, keypoints = inputs()
    expected = dense(embeddings, keypoints.requires_grad_(), loss)
    (expected_gradient,) = torch.autograd.grad(expected, embeddings)
    for elements, bounds in itertools.product([1, 45, 10**6], [[0, 7], [0, 3, 4, 7]]):  # strips of 1, 3 and all rows
        monkeypatch.setattr("peclr_dali.models.losses.weighted_nt_xent.TILE_ELEMENTS", elements)
        shares = [loss.share(embeddings, range(*ends), keypoints) for ends in itertools.pairwise(bounds)]
        gradient, of_keypoints = torch.autograd.grad(
            3 * torch.stack(shares).sum(), [embeddings, keypoints], allow_unused=True
        )
        torch.testing.assert_close(torch.stack(shares).sum(), expected, atol=1e-12, rtol=0)
        torch.testing.assert_close(gradient, 3 * expected_gradient, atol=1e-12, rtol=0)
        assert of_keypoints is None
    torch.testing.assert_close(loss(embeddings, keypoints), expected, atol=1e-12, rtol=0)


def test_equal_distances_weigh_1() -> None:
    """Such as those of one pair, where SiMHand's linear weights are 0 / 0."""
    embeddings, keypoints = inputs()
    same = keypoints[:1, :1].expand_as(keypoints)
    torch.testing.assert_close(WeightedNTXent()(embeddings, same), NTXent()(embeddings), atol=1e-12, rtol=0)
    one = WeightedNTXent(weighted="positives")(embeddings[:, :1], keypoints[:, :1])
    torch.testing.assert_close(one, NTXent()(embeddings[:, :1]), atol=1e-12, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_is_computed_in_float32_under_autocast(dtype: torch.dtype) -> None:
    embeddings, keypoints = inputs()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = WeightedNTXent()(embeddings.to(dtype), keypoints.float())
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(
        dense(embeddings.to(dtype).double(), keypoints, WeightedNTXent()).item(), abs=4e-6
    )


def test_wrong_keypoints_are_named() -> None:
    embeddings, keypoints = inputs()
    with pytest.raises(TypeError, match="keypoints_px: found NoneType, expected a dense tensor of floats"):
        WeightedNTXent()(embeddings)
    with pytest.raises(ValueError, match=r"keypoints_px has shape \(2, 6, 21, 2\), expected \(2, 7, K, 2\)"):
        WeightedNTXent()(embeddings, keypoints[:, 1:])


PEAK_BYTES = """
import re, torch
from pathlib import Path
from peclr_dali.models.losses.weighted_nt_xent import WeightedNTXent
torch.manual_seed(0)
def step(samples, rows):
    embeddings, keypoints = torch.randn(2, samples, 8, requires_grad=True), torch.rand(2, samples, 1, 2)
    WeightedNTXent().share(embeddings, range(rows), keypoints).backward()
step(64, 64)  # what torch itself takes at its first call
Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here
memory = lambda name: int(re.search(name + r":\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1])
before = memory("VmRSS")
step(8192, 512)
print((memory("VmHWM") - before) * 1024)
"""


def test_8192_images_take_a_tenth_of_their_matrix_of_cosines() -> None:
    """Whose 16384 x 16384 numbers are 1 GiB in float32."""
    done = subprocess.run(
        [sys.executable, "-c", PEAK_BYTES], cwd=Path(__file__).parents[3], capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 2**30 / 10
