"""Rows that hold two images: which pairs are admissible, which are drawn, and that each view is its image's."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chisquare

from peclr_dali import Batch, DataConfig, UserError, keypoints_of_pairs, make_loader
from peclr_dali.pipelines.samples.index import Index, join
from peclr_dali.pipelines.samples.order import EpochOrder
from peclr_dali.pipelines.samples.partners import Partners, of_pairs, of_same_group
from peclr_dali.pipelines.sources import load_index
from peclr_dali.pipelines.views.augmentation import Augmentation, ColourConfig, GeometryConfig
from tests.pipelines.harness import SMALL, assert_equal, jpeg, load, smooth_image, write_jpegs
from tests.pipelines.sources.layouts import assert_refused, write_image
from tests.pipelines.test_loader import UNDECODABLE
from tests.train.tiny_hands import write_hands

GROUPS = 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Index:
    """Sixty images of twelve groups; one image is alone in its group."""
    index = write_jpegs(tmp_path_factory.mktemp("images"), 61)
    group = np.minimum(np.arange(61) % GROUPS, 60)
    group[60] = GROUPS
    mirror, keypoints_px = np.arange(61) % 3 == 0, np.arange(61 * 42, dtype=np.float32).reshape(61, 21, 2) % 50
    index = dataclasses.replace(index, group=group, mirror=mirror, keypoints_px=keypoints_px)
    return dataclasses.replace(index, partners=of_same_group(group))


def admissible(partners: Partners | None) -> list[list[int]]:
    """The partners of each sample, by walking around once from the first."""
    assert partners is not None
    counts, samples = partners.count, np.arange(len(partners.first))
    walks = [partners.of(samples, np.zeros(len(samples)), attempt) for attempt in range(int(counts.max(initial=0)))]
    return [[int(walk[sample]) for walk in walks[:count]] for sample, count in enumerate(counts.tolist())]


@given(st.lists(st.integers(0, 5), min_size=1, max_size=30))
def test_partners_of_a_group_and_of_pairs(group: list[int]) -> None:
    assert admissible(of_pairs(np.array([(3, 1), (0, 2), (3, 0)]), 4)) == [[2], [], [], [1, 0]]
    for sample, found in enumerate(admissible(of_same_group(np.array(group)))):
        assert sorted(found) == [n for n, other in enumerate(group) if other == group[sample] and n != sample]


@given(st.lists(st.integers(0, 5), min_size=1, max_size=30), st.data())
def test_a_selection_and_a_join_keep_the_partners_that_are_there(group: list[int], data: st.DataObject) -> None:
    whole, count = of_same_group(np.array(group)), len(group)
    rows = np.array(data.draw(st.lists(st.sampled_from(range(count)), min_size=1, unique=True)))
    of_whole = admissible(whole)
    for row, found in zip(rows.tolist(), admissible(whole.select(rows)), strict=True):
        assert {int(rows[n]) for n in found} == set(of_whole[row]) & set(rows.tolist())
    joined = Partners.joined([whole, None, whole], [count, 2, count])
    assert admissible(joined) == [*of_whole, [], [], *[[n + count + 2 for n in found] for found in of_whole]]
    assert Partners.joined([None, None], [1, 2]) is None


def test_every_admissible_partner_is_drawn_alike() -> None:
    partners = of_same_group(np.array([0, 1, 0, 0, 1, 0, 2, 0]))
    order = EpochOrder(8000, 2000, seed=7)
    drawn = order.partner_draws(np.arange(10000))
    for sample, allowed in enumerate(admissible(partners)):
        chosen, counts = np.unique(partners.of(np.full(len(drawn), sample), drawn), return_counts=True)
        assert chosen.tolist() == (sorted(allowed) or [sample])
        assert len(allowed) < 2 or chisquare(counts).pvalue > 1e-4
    assert len(np.unique(drawn)) == len(drawn)
    np.testing.assert_array_equal(order.partner_draws(np.array([2005, 2003, 3999])), drawn[2000:][[5, 3, 1999]])


def test_each_view_shows_its_image_and_nothing_else_changes(folder: Index) -> None:
    """View 1 has the bits that view 1 of a loader over the partners has; view 0 those of a loader without pairs."""
    small, large = SMALL, Augmentation(GeometryConfig(side_px=24), ColourConfig(jitter="none"))
    for kinds in ([small, small], [small, large, large, small], [large, small, small]):
        pairs = load(folder, kinds, last=3, chunk=7)
        alone = load(dataclasses.replace(folder, partners=None), kinds, last=3)
        samples = torch.cat([batch.samples for batch in pairs]).numpy()
        of_partners = EpochOrder(61, 60, seed=5, fixed=samples[:, 1])
        seconds = load(dataclasses.replace(folder, partners=None), kinds, last=3, order=of_partners)
        for made, first, second in zip(pairs, alone, seconds, strict=True):
            for number, sources in enumerate([first, second, first, second][: len(kinds)]):
                assert_equal([only(made, number)], [only(sources, number)])
                assert torch.equal(made.keypoints_px(number), sources.keypoints_px(number))
        (of_pairs_px,) = keypoints_of_pairs(made)
        assert torch.equal(of_pairs_px, torch.stack([first.keypoints_px(0), second.keypoints_px(1)]))
    np.testing.assert_array_equal(folder.groups[samples[:, 0]], folder.groups[samples[:, 1]])
    np.testing.assert_array_equal(samples[:, 0] == samples[:, 1], samples[:, 0] == 60)  # which is alone in its group
    np.testing.assert_array_equal(samples[:, 0], samples[:, 2])


def test_the_dali_graph_makes_no_views_of_pairs(folder: Index) -> None:
    with pytest.raises(UserError, match=r'pipelines\.views = "dali" makes all views of one image.*as configured'):
        load(folder, views="dali")
    (batch,) = load(folder, [SMALL], views="dali", last=1)  # a single view shows one image
    assert batch.samples.shape == (20, 1)


def only(batch: Batch, view: int) -> Batch:
    return Batch((batch.views[view],), batch.samples[:, [view]], batch.positions, batch.bad)


def test_a_bad_partner_gives_way_to_the_next_and_at_last_to_the_image(tmp_path: Path) -> None:
    """Groups of one good image, of a good one with a bad one, and of two good ones among bad ones."""
    rng = np.random.default_rng(0)
    good = [jpeg(smooth_image(rng, 40, 56, 3)) for _ in range(4)]
    files = [good[0], good[1], b"", good[2], UNDECODABLE, b"no image", good[3], UNDECODABLE]
    for number, data in enumerate(files):
        (tmp_path / f"{number}.jpg").write_bytes(data)
    group = np.array([0, 1, 1, 2, 2, 2, 2, 2])
    index = load_index(DataConfig("folder", str(tmp_path)))
    index = dataclasses.replace(index, group=group, partners=of_same_group(group))
    order = EpochOrder(8, 4, seed=0, fixed=np.array([0, 1, 3, 6]))
    expected = {0: 0, 1: 1, 3: 6, 6: 3}
    met = set()
    for batch in load(index, batch=4, order=order, last=20, chunk=2):
        assert dict(batch.samples.tolist()) == expected
        met |= set(batch.bad.tolist())
    assert met == {2, 4, 5, 7}


def test_another_version_of_a_pose(tmp_path: Path) -> None:
    write_hands(tmp_path / "hands", 6)
    index = load_index(DataConfig(root=str(tmp_path / "hands"), positive="version"))
    assert {len(partners) for partners in admissible(index.partners)} == {3}
    with make_loader(index, batch=24, device="cpu", geometry=GeometryConfig(side_px=16)) as loader:
        (batch,) = loader
    assert (batch.samples[:, 0] % 6 == batch.samples[:, 1] % 6).all()
    assert (batch.samples[:, 0] != batch.samples[:, 1]).all()
    alone = DataConfig(root=str(tmp_path / "hands"), versions=("gs",), positive="version")
    assert_refused(alone, "no image of .* has a partner among data.versions. Name more in data.versions, or ch")


def test_pairs_of_a_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    images = tmp_path / "images"
    images.mkdir()
    write_jpegs(images, 5)
    boxes = tmp_path / "boxes.csv"
    rows = ["000.jpg,0,0,20,20,right", "001.jpg,0,0,20,20,right", "001.jpg,9,9,30,30,left", "002.jpg,0,0,9,9,left"]
    boxes.write_text("\n".join(["file,x0,y0,x1,y1,hand", *rows]))
    pairs = tmp_path / "pairs.csv"
    lines = ["000.jpg,0,001.jpg,01", "000.jpg,00,002.jpg,0", "001.jpg,1,000.jpg,0", "001.jpg,0,004.jpg,0"]
    pairs.write_text("\n".join(["file,number,positive,positive_number", *lines]))
    index = load_index(DataConfig("folder", str(images), box=str(boxes), positive="file", pairs=str(pairs)))
    assert admissible(index.partners) == [[2, 3], [], [0], []]
    assert (
        f"1 of 4 pairs are not of two hands that are used, with whole numbers, the first is in {pairs}, line 5: '001."
        in caplog.text
    )
    assert "2 of 4 images have no partner" in caplog.text
    pairs.write_text("file,positive\n./000.jpg,004.jpg\n")
    plain = load_index(DataConfig("folder", str(images), positive="file", pairs=str(pairs)))
    assert admissible(plain.partners) == [[4], [], [], [], []]


OF_FILE = {"positive": "file", "pairs": "p.csv"}


@pytest.mark.parametrize(
    ("settings", "text", "message"),
    [
        ({"positive": "version"}, "", "has no versions of a pose"),
        ({"positive": "file"}, "", "data.pairs = None"),
        ({"pairs": "p.csv"}, "", "data.positive = 'self' and data.pairs = 'p.csv'"),
        (OF_FILE, "a,b\n", "line 1 is 'a,b', with no columns 'file'; expected a header with each of the columns fi"),
        (OF_FILE, "file,positive\nx.jpg,x.jpg\n", "has a partner in p.csv: 1 of 1 pairs are not of two hands"),
        (OF_FILE, "file,positive\ny.jpg,x.jpg\n", "the first is in p.csv, line 2: 'y.jpg,x.jpg'. Names are rel"),
        (OF_FILE, "file,number,positive\nx.jpg,0,x.jpg\n", "line 1 is .*, with no columns 'positive_number'"),
        (OF_FILE, "file,number,positive,positive_number\nx.jpg,0,x.jpg,0.0\n", "line 2: 'x.jpg,0,x.jpg,0.0'"),
        (OF_FILE | {"pairs": "q.csv"}, "", "q.csv: No such file"),
    ],
)
def test_pairs_that_cannot_be_used_are_one_line(
    settings: dict[str, Any], text: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_image(tmp_path / "images" / "x.jpg", 56, 40)
    (tmp_path / "p.csv").write_text(text)
    assert_refused(DataConfig("folder", "images", **settings), message)


def test_several_sources_with_and_without_pairs(folder: Index) -> None:
    alone = dataclasses.replace(folder, partners=None)
    for batch in load(join([folder, alone], [1, 1]), last=3):
        first, second = batch.samples.T
        assert torch.equal(first[first >= 61], second[first >= 61])
        assert (first[first < 60] != second[first < 60]).all()
