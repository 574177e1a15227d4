from functools import cache

import numpy as np
import pytest

from peclr_dali.synthetic.field import PARTS, Solids, distance_to_skin, part_distance
from peclr_dali.synthetic.hand import SIDE_PX, VARIED, Hand, draw_hand, project
from peclr_dali.synthetic.render import HIT_M, Rendering, render


@cache
def rendered(seed: int) -> tuple[Hand, Rendering]:
    hand = draw_hand(np.random.default_rng([21, seed]))
    # Bare: a sleeve or an object would rightly hide keypoints.
    bare = hand._replace(solids=hand.solids._replace(sleeve=np.zeros(8), prop=np.zeros(16)))
    return bare, render(bare.solids, bare.paint, bare.shape.bulk, bare.intrinsics, SIDE_PX)


HANDS = 30
CAMERA = np.array([[500.0, 0, 112], [0, 500.0, 112], [0, 0, 1]])


def coverage_of(picture: Rendering) -> np.ndarray:
    """Share of each pixel that surfaces cover, (SIDE_PX, SIDE_PX)."""
    coverage = np.zeros(SIDE_PX * SIDE_PX)
    np.add.at(coverage, picture.pixels, picture.samples[:, 0])
    return coverage.reshape(SIDE_PX, SIDE_PX)


def one_capsule(start: np.ndarray, end: np.ndarray, radius: float) -> Solids:
    """Every part of the hand collapsed into one tiny far one, but for the index finger's first."""
    parts = np.zeros((PARTS, 10))
    parts[:] = [0, 0, 50, 0, 0, 1e-3, 0, 0, 0, 1e6]
    parts[15] = [*start, *(end - start), radius, 0, 0, 1 / ((end - start) ** 2).sum()]
    bounds = np.repeat(parts[:1], 6, axis=0)
    bounds[0, 3:6] = 0.0
    bounds[2] = parts[15]
    bounds[2, 6] += 0.01
    return Solids(parts, np.zeros((PARTS, 9)), bounds, np.zeros(8), np.zeros(16))


def test_keypoints_project_into_the_picture_around_its_centre() -> None:
    boxes, inside = [], []
    for seed in range(200):
        hand = draw_hand(np.random.default_rng([22, seed]))
        image = project(hand.xyz_m, hand.intrinsics)
        inside.append(((image > 0) & (image < SIDE_PX)).all())
        low, high = image.min(axis=0), image.max(axis=0)
        boxes.append([*(low + high) / 2, (high - low).max()])
        assert (hand.xyz_m[:, 2] > 0.15).all()
        # A reflection would make it a left hand.
        assert abs(np.linalg.det(hand.solids.frames[0].reshape(3, 3)) - 1) < 1e-9
        assert 400 * 0.99 < hand.intrinsics[0, 0] < 600 * 1.01
    centre_x, centre_y, side = np.array(boxes).T
    assert np.mean(inside) > 0.99
    assert np.abs(centre_x - SIDE_PX / 2).max() < 20
    assert np.abs(centre_y - SIDE_PX / 2).max() < 20
    assert np.mean((side > 88) & (side < 152)) > 0.97


def test_varied_hands_are_seen_from_all_directions_and_from_near() -> None:
    hands = [draw_hand(np.random.default_rng([22, seed]), VARIED) for seed in range(200)]
    images = [project(hand.xyz_m, hand.intrinsics) for hand in hands]
    sides = np.array([(image.max(axis=0) - image.min(axis=0)).max() for image in images])
    assert np.quantile(sides, 0.1) < 75
    assert np.quantile(sides, 0.9) > 170
    assert sides.max() < SIDE_PX
    upward = np.array([image[0, 1] - image[9, 1] for image in images]) > 0  # the middle knuckle above the wrist
    assert 0.35 < upward.mean() < 0.75
    along = np.array([hand.xyz_m[9] - hand.xyz_m[0] for hand in hands])
    assert np.mean((np.abs(along[:, 2]) / np.linalg.norm(along, axis=1)) > np.sin(1.05)) > 0.1
    assert all((hand.xyz_m[:, 2] > 0.085).all() for hand in hands)
    assert np.mean([hand.solids.sleeve[7] for hand in hands]) > 0.5
    assert np.mean([hand.solids.prop[0] > 0 for hand in hands]) > 0.2


def test_the_surface_over_a_keypoint_is_at_most_a_fingers_thickness_in_front_of_it() -> None:
    visible = tips = 0
    for seed in range(HANDS):
        hand, picture = rendered(seed)
        image = project(hand.xyz_m, hand.intrinsics)
        for joint in range(1, 21):
            column, row = np.floor(image[joint]).astype(int)
            if not (0 <= column < SIDE_PX and 0 <= row < SIDE_PX):
                continue
            surface = picture.depth_m[row, column]
            if joint % 4 == 0 and surface == 0:
                # A fingertip lies on the outline when seen from the side: then the hand is in the next pixel.
                around = picture.depth_m[max(row - 1, 0) : row + 2, max(column - 1, 0) : column + 2]
                surface = around.max()
            assert surface > 0, "no hand where K puts a joint"
            behind = hand.xyz_m[joint, 2] - surface
            # Never behind the surface's far side; nearer surfaces are other parts in front of this one.
            assert behind > -0.014
            radius = hand.shape.radii_m[(joint - 1) // 4, (joint - 1) % 4]
            if behind < 1.5 * radius:
                visible += 1
                tips += joint % 4 == 0
    assert visible > 0.45 * 20 * HANDS
    assert tips > 0.45 * 5 * HANDS


def test_a_fingertip_ends_where_its_keypoint_is() -> None:
    for seed in range(HANDS):
        hand, _ = rendered(seed)
        for digit in range(5):
            tip, joint = hand.xyz_m[4 + 4 * digit], hand.xyz_m[3 + 4 * digit]
            along = (tip - joint) / np.linalg.norm(tip - joint)
            assert distance_to_skin(hand.solids, tip) < 0.0005
            x, y, z = tip + 0.004 * along
            assert part_distance(x, y, z, hand.solids.parts, 14 + 3 * digit) > 0.001


def test_pixels_are_corner_based() -> None:
    hand, _ = rendered(0)
    target = np.array([130.3, 91.8])
    centre = np.array([*((target - 112) / 500 * 0.6), 0.6])
    ball = one_capsule(centre, centre + np.array([0, 0, 1e-5]), 0.012)
    picture = render(ball, hand.paint, 1.0, CAMERA, SIDE_PX)
    coverage = coverage_of(picture)
    pixel = np.arange(SIDE_PX) + 0.5
    found = np.array([(coverage.sum(0) * pixel).sum(), (coverage.sum(1) * pixel).sum()]) / coverage.sum()
    # Outlines have four samples per pixel, hence the tolerance; a frame with centres at whole numbers is off by 0.5.
    np.testing.assert_allclose(found, target, atol=0.1)
    assert abs(np.sqrt(coverage.sum() / np.pi) - 500 * (0.012 + HIT_M) / 0.6) < 0.1
    # The nearest point of the ball.
    assert abs(picture.depth_m[91, 130] - (0.6 - 0.012 - HIT_M)) < 0.001


@pytest.mark.parametrize("upright", [True, False])
def test_edges_are_antialiased_across_and_down(upright: bool) -> None:
    hand, _ = rendered(0)
    axis = np.array([0.0, 0.03, 0.0] if upright else [0.03, 0.0, 0.0])
    centre = np.array([0.0, 0.0, 0.6])
    # A rod 20.5 pixels thick: from a quarter before a pixel to a quarter into one.
    rod = one_capsule(centre - axis, centre + axis, 10.25 * 0.6 / 500 - HIT_M)
    picture = render(rod, hand.paint, 1.0, CAMERA, SIDE_PX)
    np.testing.assert_allclose(coverage_of(picture).sum(axis=1 if upright else 0)[102:122], 20.5, atol=0.01)


def test_the_nearer_part_hides_the_farther() -> None:
    for seed in range(HANDS):
        hand, picture = rendered(seed)
        rows, columns = np.nonzero(picture.depth_m)
        for pick in np.random.default_rng(seed).choice(len(rows), 40, replace=False):
            row, column = rows[pick], columns[pick]
            ray = np.linalg.solve(hand.intrinsics, np.array([column + 0.5, row + 0.5, 1.0]))
            depth = float(picture.depth_m[row, column])
            solids = hand.solids
            assert abs(distance_to_skin(solids, ray * depth)) < 0.0011
            before = [distance_to_skin(solids, ray * z) for z in np.arange(depth - 0.002, 0.1, -0.002)]
            assert min(before) > -0.0001, "something nearer was overlooked"


def test_some_hands_hold_an_object_that_does_not_enter_the_hand() -> None:
    held = 0
    for seed in range(120):
        solids = draw_hand(np.random.default_rng([23, seed])).solids
        if solids.prop[0] == 0:
            continue
        held += 1
        free = distance_to_skin(solids, solids.prop[1:4])
        assert free >= 0.0099
        assert solids.prop[5:7].max() <= free + 1e-9
    assert 5 <= held <= 35
