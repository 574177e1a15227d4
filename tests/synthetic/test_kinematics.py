import numpy as np
import pytest

from peclr_dali.synthetic.poses import (
    LIMITS_RAD,
    MAX_OVERLAP_M,
    deepest_overlap,
    draw_pose,
    draw_shape,
    pose_hand,
    within_limits,
)


@pytest.mark.parametrize("grasp", [False, True])
def test_segments_of_drawn_poses_stay_apart(grasp: bool) -> None:
    overlaps = []
    for seed in range(150):
        rng = np.random.default_rng([11, seed])
        shape = draw_shape(rng)
        overlaps.append(deepest_overlap(draw_pose(rng, shape, grasp=grasp).joints_m, shape.radii_m))
    assert np.mean(np.array(overlaps) <= MAX_OVERLAP_M) > 0.97
    assert max(overlaps) < 2 * MAX_OVERLAP_M


def test_limits_clip_and_bent_fingers_do_not_spread() -> None:
    wild = within_limits(np.full((5, 4), 9.0))
    assert (wild <= LIMITS_RAD[..., 1]).all()
    assert (wild[1:, 0] < 0.2 * LIMITS_RAD[1:, 0, 1]).all()
    assert wild[0, 0] == LIMITS_RAD[0, 0, 1]


def test_overlap_is_the_depth_that_two_fingers_share() -> None:
    shape = draw_shape(np.random.default_rng(0))
    joints = pose_hand(shape, np.zeros((5, 4))).joints_m.copy()
    assert deepest_overlap(joints, shape.radii_m) < 0.003
    # The little finger's end laid into the index finger's.
    joints[18:21] = joints[6:9] + np.array([0.0, 0.0, 0.004])
    assert deepest_overlap(joints, shape.radii_m) > 0.008


def test_bones_keep_their_length_in_every_pose() -> None:
    rng = np.random.default_rng(4)
    shape = draw_shape(rng)
    for _ in range(50):
        skeleton = pose_hand(shape, rng.uniform(LIMITS_RAD[..., 0], LIMITS_RAD[..., 1]))
        bones = np.diff(skeleton.joints_m[1:].reshape(5, 4, 3), axis=1)
        np.testing.assert_allclose(np.linalg.norm(bones, axis=2), shape.segments_m, atol=1e-12)
        np.testing.assert_allclose(skeleton.joints_m[1::4], shape.roots_m, atol=0)


def test_it_is_a_right_hand_that_bends_towards_its_palm() -> None:
    shape = draw_shape(np.random.default_rng(2))
    straight, bent = np.zeros((5, 4)), np.zeros((5, 4))
    bent[1:, 1:] = 0.8
    joints, curled = pose_hand(shape, straight).joints_m, pose_hand(shape, bent).joints_m
    # Seen from the back (z towards the eye) with the fingers up, the thumb is on the left.
    assert joints[4, 0] < joints[5, 0] < joints[9, 0] < joints[13, 0] < joints[17, 0]
    assert (joints[[8, 12, 16, 20], 1] > joints[[5, 9, 13, 17], 1] + 0.05).all()
    assert (curled[[8, 12, 16, 20], 2] < -0.03).all()
