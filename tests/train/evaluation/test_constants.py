"""Constant predictions: against closed forms, and what does not count."""

from pathlib import Path

import cv2
import numpy as np
import pytest

from peclr_dali.pipelines.samples.index import Index
from peclr_dali.skeleton import HAND
from peclr_dali.train.evaluation.errors import constant_pose_errors, evaluation_constants, mean_keypoints_px
from peclr_dali.train.pose.labels import PoseLabels
from tests.train import tiny_hands


def test_constants_of_a_hand_that_only_turns() -> None:
    """About its long axis: the rigid hand is exact."""
    hand = tiny_hands.random_hands_m(np.random.default_rng(0), 1)[0]
    angles_rad = np.random.default_rng(1).uniform(0, 2 * np.pi, 200)
    hands = np.stack([hand @ cv2.Rodrigues(np.array([0, angle_rad, 0]))[0].T for angle_rad in angles_rad])
    errors = constant_pose_errors(hands)
    assert errors["rigid_pose"]["pa_epe_cm"] < 1e-6
    assert errors["mean_joints"]["epe_cm"] > 1


def test_the_mean_joints_are_where_the_hands_are_on_the_average() -> None:
    """A hand that is moved by 3 cm to one side and to the other is 3 cm from its mean everywhere."""
    hand = tiny_hands.random_hands_m(np.random.default_rng(0), 1)
    aside_m = np.array([0.03, 0, 0])
    errors = constant_pose_errors(np.concatenate([hand + aside_m, hand - aside_m]))
    assert errors["mean_joints"]["epe_cm"] == pytest.approx(3)
    assert errors["mean_joints"]["auc"] == pytest.approx(0.4, abs=0.01)  # right above 3 of 5 cm
    assert errors["rigid_pose"]["pa_epe_cm"] < 1e-6


def test_labels_of_one_point_do_not_count() -> None:
    hands = tiny_hands.random_hands_m(np.random.default_rng(0), 20)
    spoilt = np.concatenate([np.full((1, 21, 3), 0.5), hands, np.ones((1, 21, 3)), np.full((1, 21, 3), np.nan)])
    assert constant_pose_errors(spoilt) == constant_pose_errors(hands)
    assert constant_pose_errors(np.full((3, 21, 3), np.nan)) == {}


def labelled(keypoints_px: np.ndarray, box_px: np.ndarray, mirror: np.ndarray) -> Index:
    paths = [f"{row}.jpg" for row in range(len(box_px))]
    return Index("test", Path(), paths, box_px.astype(np.float32), keypoints_px.astype(np.float32), mirror)


def test_hands_that_are_alike_in_their_boxes_are_met_exactly() -> None:
    """Boxes of any place and size, left hands in a mirror: the mean keypoints are the keypoints."""
    rng = np.random.default_rng(0)
    in_box, box_px = rng.uniform(-0.5, 0.5, (21, 2)), rng.uniform(20, 100, (12, 3))
    mirror = np.arange(12) % 3 == 0
    turned = np.where(mirror[:, None, None], [[-1.0, 1.0]], 1.0)
    keypoints_px = in_box * turned * box_px[:, 2:, None] + box_px[:, None, :2]
    index = labelled(keypoints_px, box_px, mirror)
    np.testing.assert_allclose(mean_keypoints_px(index, PoseLabels.of(index)), keypoints_px, atol=1e-4)
    assert evaluation_constants(index, PoseLabels.of(index)).keys() == {"mean_keypoints"}


def test_the_mean_is_over_what_is_known() -> None:
    """Two hands, 10 px apart in boxes of 100 and 200 px: 0.1 and 0.05 of the side from each other's place."""
    box_px = np.array([[50.0, 50, 100], [100, 100, 200], [0, 0, 0]])
    keypoints_px = np.broadcast_to(box_px[:, None, :2], (3, 21, 2)).copy()
    keypoints_px[0, :, 0] += 10
    keypoints_px[1, 0] = np.nan  # the first keypoint is known in the first hand only
    index = labelled(keypoints_px, box_px, np.zeros(3, bool))
    (found,) = evaluation_constants(index, PoseLabels.of(index)).values()
    errors_px = np.array([0, *[(5 + 10) / 2] * 20])  # 0.05 of 100 px and of 200 px
    assert found["epe_px"] == pytest.approx(errors_px.mean(), abs=1e-4)
    assert len(HAND) == len(errors_px)
