import itertools
from typing import get_args

import numpy as np
import pytest
import torch

from models.hand import BONES, FINGERS, KEYPOINTS, ORDERS, REFERENCE_BONE, Order, permutation, reorder

# Indices as their sources number them, written out: FreiHAND's and MANO's own, and those of the authors' test code.
WHERE = {
    "freihand": {"thumb_mcp": 1, "thumb_tip": 4, "index_mcp": 5, "middle_pip": 10, "ring_dip": 15, "little_tip": 20},
    "mano": {"index_mcp": 1, "middle_mcp": 4, "little_mcp": 7, "ring_dip": 12, "thumb_mcp": 13, "thumb_pip": 14,
             "thumb_tip": 16, "index_tip": 17, "little_tip": 20},
    "ho3d": {"index_mcp": 1, "little_dip": 9, "ring_mcp": 10, "thumb_mcp": 13, "thumb_tip": 16, "little_tip": 20},
    "peclr": {"thumb_mcp": 1, "index_mcp": 2, "middle_mcp": 3, "middle_pip": 8, "thumb_dip": 11, "thumb_tip": 16,
              "little_tip": 20},
}  # fmt: skip


@pytest.mark.parametrize("order", get_args(Order))
def test_names_stand_where_their_source_has_them(order: Order) -> None:
    names = ORDERS[order]
    assert sorted(names) == sorted(KEYPOINTS)
    assert names[0] == "wrist"
    for name, row in WHERE[order].items():
        assert names[row] == name


@pytest.mark.parametrize(("source", "target"), list(itertools.product(get_args(Order), repeat=2)))
def test_reordering_follows_the_names_and_comes_back(source: Order, target: Order) -> None:
    rng = np.random.default_rng(0)
    hands = rng.normal(size=(2, 21, 3))
    there = reorder(hands, source, target)
    for finger in FINGERS:
        for joint in ("mcp", "pip", "dip", "tip"):
            name = f"{finger}_{joint}"
            np.testing.assert_array_equal(there[:, ORDERS[target].index(name)], hands[:, ORDERS[source].index(name)])
    np.testing.assert_array_equal(reorder(there, target, source), hands)
    np.testing.assert_array_equal(reorder(torch.from_numpy(hands), source, target).numpy(), there)


def test_authors_order_equals_their_conversion_written_out() -> None:
    """Their test code fills FreiHAND's array by name from these rows."""
    fingers = [[1, 6, 11, 16], [2, 7, 12, 17], [3, 8, 13, 18], [4, 9, 14, 19], [5, 10, 15, 20]]
    assert permutation("peclr", "freihand") == [0, *itertools.chain.from_iterable(fingers)]


def test_bones_are_a_tree_from_the_wrist_outward() -> None:
    assert len(BONES) == 20
    assert {child for _, child in BONES} == set(range(1, 21))
    for parent, child in BONES:
        finger, joint = KEYPOINTS[child].split("_")
        expected = {"mcp": "wrist", "pip": f"{finger}_mcp", "dip": f"{finger}_pip", "tip": f"{finger}_dip"}[joint]
        assert KEYPOINTS[parent] == expected
    assert REFERENCE_BONE in BONES
    assert [KEYPOINTS[row] for row in REFERENCE_BONE] == ["middle_mcp", "middle_pip"]


def test_other_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"\(20, 3\), expected \(\.\.\., 21, C\)"):
        reorder(np.zeros((20, 3)), "mano", "freihand")
