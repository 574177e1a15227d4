"""The box that a configuration asks for."""

import dataclasses
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

from peclr_dali.errors import UserError
from peclr_dali.pipelines.config import DataConfig
from peclr_dali.pipelines.samples.index import Index, join
from peclr_dali.pipelines.sources import load_index, write_bad_list
from tests.pipelines.sources.layouts import write_image
from tests.pipelines.sources.test_freihand import write_part

SPLITS: tuple[Literal["all", "train", "val"], ...] = ("all", "train", "val")


def test_other_images_are_described_in_other_words(tmp_path: Path) -> None:
    """The same images at another place in the same words."""
    box_px = np.full((2, 3), 7, np.float32)
    index = Index("hands", tmp_path, ["a/1.jpg", "a/2.jpg"], box_px)
    others = [
        dataclasses.replace(index, paths=["a/1.jpg", "a/3.jpg"]),
        dataclasses.replace(index, box_px=box_px * np.array([[1], [2]], np.float32)),
        join([index, index], [1, 1]),
        join([index, dataclasses.replace(index, box_px=box_px + 1)], [1, 1]),
    ]
    assert Index("hands", tmp_path / "b", ["1.jpg", "2.jpg"], box_px).in_words() == index.in_words()
    assert len({one.in_words() for one in (index, *others)}) == 1 + len(others)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"mirror": np.array([0, 1])}, r"mirror is \(2,\) of int64, expected a NumPy array \(2,\) of bools"),
        (
            {"keypoints_px": np.zeros((2, 21, 3))},
            r"keypoints_px is \(2, 21, 3\) .*expected a NumPy array \(2, 21, 2\) of f",
        ),
        ({"box_px": [[0.0, 0.0, 0.0]] * 2}, r"box_px is \(2, 3\) of list, expected a NumPy array \(2, 3\) of floats"),
        ({"box_px": np.zeros((2, 4))}, r"box_px is \(2, 4\) of float64, expected a NumPy array \(2, 3\) of floats"),
        ({"targets": {"K": np.zeros((3, 3, 3))}}, r"K is \(3, 3, 3\) of float64, expected a NumPy array \(2, 3, 3\)"),
    ],
)
def test_tables_that_do_not_fit_are_named(given: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        Index("hands", tmp_path, ["1.jpg", "2.jpg"], **{"box_px": np.zeros((2, 3), np.float32), **given})


def test_masks_choose_rows_and_a_relative_folder_stays_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "b.jpg").write_bytes(b"b")
    index = Index("hands", Path(), ["a.jpg", "b.jpg"], np.zeros((2, 3), np.float32))
    assert index.select(np.array([True, True])).paths == ["a.jpg", "b.jpg"]
    monkeypatch.chdir("/")
    assert index.select(np.array([False, True])).read(0) == b"b"


def test_a_source_within_another_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_image(tmp_path / "deep/one/a.png", 60, 40)
    folders = [DataConfig("folder", str(tmp_path / folder)) for folder in ("deep/one", "deep/../deep")]
    with pytest.raises(UserError, match="No such file"):
        load_index([*folders, DataConfig("coco", str(tmp_path / "deep"))])
    assert caplog.text.count(f"data: {tmp_path / 'deep/one'} is within {tmp_path / 'deep'}") == 2


def test_several_sources_become_one_index(tmp_path: Path) -> None:
    """Rows one source after the other, each file where it lies, keypoints NaN where there are none."""
    for name in "ab":
        write_image(tmp_path / f"deep/one/{name}.png", 60, 40)
    write_part(tmp_path / "two", "training", 1, 4)
    configs = (
        DataConfig(source="folder", root=str(tmp_path / "deep/one"), weight=3),
        DataConfig(root=str(tmp_path / "two")),
    )
    index = load_index(configs)
    assert (len(index), index.counts) == (6, [2, 4])
    assert [source.weight for source in index.sources] == [3, 1]
    assert all(index.path(sample).is_file() for sample in range(6))
    assert [index.path(sample).name for sample in range(3)] == ["a.png", "b.png", "00000000.jpg"]
    folder, hands = (load_index(config) for config in configs)
    np.testing.assert_array_equal(index.box_px, np.concatenate([folder.box_px, hands.box_px]))
    assert np.isnan(index.tables["keypoints_px"][:2]).all()
    np.testing.assert_array_equal(index.tables["keypoints_px"][2:], hands.keypoints_px)
    assert index.targets == {}
    assert index.mirror is None
    both = join([dataclasses.replace(folder, mirror=np.array([True, False])), hands], [1, 1])
    assert both.mirrored.tolist() == [True] + [False] * 5
    assert load_index(configs[:1]).sources == ()


def test_a_fraction_of_the_labels_is_one_of_poses(tmp_path: Path) -> None:
    poses = 40
    write_part(tmp_path, "training", poses, 4 * poses)
    quarter = load_index(DataConfig(root=str(tmp_path), label_fraction=0.25))
    assert (len(quarter), len({int(Path(path).stem) % poses for path in quarter.paths})) == (40, 10)
    first = load_index(DataConfig(root=str(tmp_path), label_fraction=0.25, versions=("gs",))).paths
    assert first == [path for path in quarter.paths if int(Path(path).stem) < poses]
    assert len(load_index(DataConfig(root=str(tmp_path), label_fraction=0.25, split="train"))) == 36


def test_groups_of_several_sources_do_not_meet(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    boxes = np.zeros((4, 3), np.float32)
    groups = [rng.integers(-(2**62), 2**62, 3)[[0, 1, 1, 2]] for _ in range(2)]
    parts = [Index("a", tmp_path, ["x"] * 4, boxes, group=group) for group in (*groups, None)]
    joined = join(parts, [1, 1, 1]).groups
    assert len(set(joined.tolist())) == 3 + 3 + 4
    assert joined[1] == joined[2]
    assert join([parts[2], parts[2]], [1, 1]).group is None


def test_a_bad_list_holds_files_of_all_splits_and_parts(tmp_path: Path) -> None:
    poses = 20
    write_part(tmp_path, "training", poses, 4 * poses)
    write_part(tmp_path, "evaluation", 3, 3)
    bad = tmp_path / "bad.jsonl"

    def left(**keys: Any) -> set[str]:
        return set(load_index(DataConfig(root=str(tmp_path), bad_list=str(bad), **keys)).paths)

    whole = {split: list(load_index(DataConfig(root=str(tmp_path), split=split)).paths) for split in SPLITS}
    assert set(whole["train"]).isdisjoint(whole["val"])
    for listed in (whole["train"][:2] + whole["val"][:1], whole["val"][:1], whole["train"][:2]):
        write_bad_list(bad, {f"./{name}": "empty file" for name in listed})
        for split in SPLITS:
            assert left(split=split) == set(whole[split]) - set(listed)
        assert left(split="val", versions=("auto",)) == {
            path for path in whole["val"] if int(Path(path).stem) >= 3 * poses
        } - set(listed)
        assert len(left(part="evaluation")) == 3
