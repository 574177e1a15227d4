"""What is wrong with the labels of samples, whatever source they are from: the rules, and who judges by them.

A rule is a function from the tables of N samples to two masks (N,): the samples that it can judge, and the wrong ones
among them. `RULES` has them all. Wrong labels cause no error later: the views have one colour, or the losses of wrong
hands are learnt.
"""

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from peclr_dali.errors import UserError
from peclr_dali.pipelines.arrays import AnyArray, BoolArray, DoubleArray, IntArray
from peclr_dali.pipelines.files.check import image_headers, spread
from peclr_dali.pipelines.files.image_file import upright_size_px
from peclr_dali.pipelines.samples.index import Index, project_px
from peclr_dali.skeleton import HAND

_log = logging.getLogger(__name__)

Tables: TypeAlias = Mapping[str, AnyArray]
"""Arrays with N rows by name: those of an `Index` (see there) and its targets, as far as it has them, and

- "size_px" (N, 2), width and height of the images as displayed; NaN where they are not known.
- "common_size_px", the same, for an index whose images have one size.
"""

Masks: TypeAlias = tuple[BoolArray, BoolArray]


@dataclass(frozen=True)
class Rule:
    """A rule for the labels of samples.

    Attributes:
        masks: the samples that can be judged, and the wrong ones.
        tables: what it needs; without one of them it is left out. Messages show a wrong sample's rows of the first two.
        found: what is wrong, after "3 of 100".
        expected: what was expected, and what to do.
        most: the largest share of wrong samples that is only warned of. Above it, unit or layout must be wrong. With 1
            all may be right: the rule only doubts them.
    """

    masks: Callable[[Tables], Masks]
    tables: tuple[str, ...]
    found: str
    expected: str
    most: float = 0.5


def boxes_without_numbers(tables: Tables) -> Masks:
    """Boxes with NaN, infinity, or no side; whole images (0, 0, 0) are none. Up to 2**24 float32 resolves a pixel."""
    x_px, y_px, side_px = np.ascontiguousarray(tables["box_px"].T)  # three times as fast, of millions
    sound = (np.abs(x_px) <= 2.0**24) & (np.abs(y_px) <= 2.0**24) & (side_px > 0) & (side_px <= 2.0**24)
    return (x_px != 0) | (y_px != 0) | (side_px != 0), ~sound


def boxes_without_pixels(tables: Tables) -> Masks:
    """Boxes smaller than two pixels, as those in fractions of an image are, or left of or above any image."""
    x_px, y_px, side_px = np.ascontiguousarray(tables["box_px"].T)
    return side_px > 0, (side_px < 2.0) | (np.minimum(x_px, y_px) + side_px / 2 <= 0)


def boxes_of_both_sides(tables: Tables) -> Masks:
    """Boxes of a right and of a left hand of the same group."""
    box_px, left = tables["box_px"], tables["mirror"]
    keys = tables["group"] + _hash_of_rows(box_px)
    return box_px[:, 2] > 0, np.isin(keys, keys[left]) & np.isin(keys, keys[~left])


def _hash_of_rows(table: AnyArray) -> IntArray:
    """A number for the bits of each of N rows of float32."""
    bits = np.ascontiguousarray(table, np.float32).view(np.int32).reshape(len(table), int(np.prod(table.shape[1:])))
    return np.asarray(bits @ np.random.default_rng(0).integers(2**62, size=bits.shape[1]))


def boxes_beyond_images(tables: Tables) -> Masks:
    """Boxes whose centre is right of or below the image, or 20 times as large, in which the image is a dot."""
    box_px, size_px = tables["box_px"], tables["size_px"]
    beyond = (box_px[:, :2] >= size_px).any(axis=1)
    longer_px = np.maximum(size_px[:, 0], size_px[:, 1])  # 20 times as fast as a maximum over an axis, of millions
    return known_sizes(size_px) & (box_px[:, 2] > 0), beyond | (box_px[:, 2] > 20.0 * longer_px)


def boxes_in_a_corner(tables: Tables) -> Masks:
    """All of 8 boxes or more, if their centres are left of and above those of the images, as in smaller images.

    By the middle of their range, so that hands may be anywhere.
    """
    known = known_sizes(tables["size_px"]) & (tables["box_px"][:, 2] > 0)
    centres = tables["box_px"][known, :2] / tables["size_px"][known]
    in_a_corner = len(centres) >= 8 and (centres.min(axis=0) + centres.max(axis=0) < 0.75).all()
    return known, np.full(len(known), in_a_corner)


def known_sizes(size_px: AnyArray) -> BoolArray:
    """Mask (N,) of the known sizes (N, 2)."""
    return np.asarray((size_px > 0).all(axis=1))


def sizes_of_labels(tables: Tables) -> Masks:
    """Images of another size than their labels say."""
    labelled_px, size_px = tables["labelled_size_px"], tables["size_px"]
    return known_sizes(labelled_px) & known_sizes(size_px), (labelled_px != size_px).any(axis=1)


def sizes_that_differ(tables: Tables) -> Masks:
    """Images of another size than the first known one, where all have one size."""
    size_px = tables["common_size_px"]
    known = known_sizes(size_px)
    return known, (size_px != size_px[known.argmax()]).any(axis=1)


def cameras_of_other_sizes(tables: Tables, most: float = 0.2) -> Masks:
    """All images, if neither their cameras nor their hands have the centre of the images, by joints and by extent.

    The image of a whole camera has the camera's centre in its middle, and a cropped one the hand's: their medians are
    usually within `most` of half the image's sides.
    """
    size_px, points_px, known = tables["size_px"][:, None], tables["keypoints_px"], known_sizes(tables["size_px"])
    middle_px = (np.fmin.reduce(points_px, axis=1) + np.fmax.reduce(points_px, axis=1))[:, None] / 2
    centres = [points[known] / size_px[known] for points in (tables["K"][:, None, :2, 2], points_px, middle_px)]
    wrong = not any(np.isnan(points).all() for points in centres) and all(
        np.abs(2 * np.nanmedian(points, axis=(0, 1)) - 1).max() > most for points in centres
    )
    return known, np.full(len(known), wrong)


OFF_CENTRE = 0.11
"""The same, where it is doubtful: the centre of 256 pixels in an image of 224 is at 0.14."""


def cameras_off_centre(tables: Tables) -> Masks:
    """As `cameras_of_other_sizes`, for less."""
    return cameras_of_other_sizes(tables, OFF_CENTRE)


# Smallest and largest focal length of a camera.
_FOCAL_PX = (10.0, 1e5)

CAMERA = (
    f"focal lengths of {_FOCAL_PX[0]:g} to {_FOCAL_PX[1]:.0f} px, ten times the skew or more and neither twice the "
    "other, and a last row of 0, 0, 1"
)
"""What a camera is, in words."""


def are_cameras(cameras: AnyArray) -> BoolArray:
    """Mask (N,) of the matrices (N, 3, 3) that are a camera's, in pixels, see `CAMERA`."""
    focal_px, skew_px = cameras[:, [0, 1], [0, 1]], np.abs(cameras[:, [0, 1], [1, 0]])
    least_px = np.fmax(_FOCAL_PX[0], np.fmax(10 * skew_px, focal_px[:, ::-1] / 2))
    in_range = (focal_px >= least_px) & (focal_px <= _FOCAL_PX[1])
    return np.asarray(
        in_range.all(axis=1)
        & (np.abs(cameras[:, :2]) < 1e6).all(axis=(1, 2))
        & (cameras[:, 2] == [0, 0, 1]).all(axis=1)
    )


def joints_are_known(tables: Tables) -> BoolArray:
    """Mask (N,) of the samples with a joint in 3D."""
    if "xyz_m" not in tables:
        return np.zeros(len(tables["box_px"]), bool)
    return np.asarray(~np.isnan(tables["xyz_m"][..., 2]).all(axis=1))


def cameras_without_form(tables: Tables) -> Masks:
    """Cameras that are no cameras, and joints without any."""
    return joints_are_known(tables) | ~np.isnan(tables["K"][:, 0, 0]), ~are_cameras(tables["K"])


def cameras_beside_boxes(tables: Tables) -> Masks:
    """Cameras that look past their boxes by more than 63 degrees: their centres are far outside of the image."""
    box_px, cameras = tables["box_px"], tables["K"]
    tangent = np.abs(box_px[:, :2] - cameras[:, :2, 2]) / cameras[:, [0, 1], [0, 1]]
    return (box_px[:, 2] > 0) & ~np.isnan(tangent).any(axis=1), (tangent > 2.0).any(axis=1)


# Largest distance of a hand in metres.
_FARTHEST_M = 20.0


def joints_out_of_sight(tables: Tables) -> Masks:
    """Hands with a joint behind the camera, or too far from it."""
    depth_m = tables["xyz_m"][..., 2]
    return joints_are_known(tables), np.asarray(((depth_m <= 0) | (depth_m > _FARTHEST_M)).any(axis=1))


# Smallest and largest length of the reference bone in metres, where only that is known.
_BONE_M = (0.002, 1.0)

# The same of a hand with joints; adults have 0.03 to 0.06.
_HAND_BONE_M = (0.01, 0.12)


def scales_of_no_bone(tables: Tables) -> Masks:
    """Lengths of the reference bone that cannot be metres, or differ by half from that of the joints."""
    scale_m = tables["scale_m"]
    wrong: BoolArray = (scale_m > _BONE_M[1]) | ((scale_m < _BONE_M[0]) & (scale_m > 0))
    if "xyz_m" in tables:
        bone_m = _reference_bone_m(tables)
        wrong |= (scale_m > 1.5 * bone_m) | (1.5 * scale_m < bone_m)
    return ~np.isnan(scale_m), wrong


def scales_of_other_hands(tables: Tables) -> Masks:
    """Lengths of the reference bone that differ by 5 % from that of the joints, as those of other poses do."""
    bone_m = _reference_bone_m(tables)
    return ~np.isnan(tables["scale_m"] * bone_m), np.abs(tables["scale_m"] - bone_m) > 0.05 * bone_m


def joints_of_no_hand(tables: Tables) -> Masks:
    """Hands whose reference bone cannot be in metres."""
    bone_m = _reference_bone_m(tables)
    return ~np.isnan(bone_m), (bone_m < _HAND_BONE_M[0]) | (bone_m > _HAND_BONE_M[1])


def _reference_bone_m(tables: Tables) -> DoubleArray:
    start, end = HAND.reference_bone
    return np.asarray(np.linalg.norm(tables["xyz_m"][:, start] - tables["xyz_m"][:, end], axis=1))


# The keypoints at both ends of each finger's bones, from the wrist on.
_ENDS = np.arange(1, len(HAND)).reshape(5, 4)
_STARTS = np.concatenate([np.zeros((5, 1), int), _ENDS[:, :-1]], axis=1)

# The first joints of four fingers and of the thumb, the nearest of the others' joints to each, and one farther away.
_FIRST, _NEAR, _FAR = [0, 5, 9, 17, 1], [1, 9, 13, 13, 5], [4, 13, 17, 9, 17]


def joints_at_one_place(tables: Tables) -> Masks:
    """All hands, if a joint or a middle of them is at the same place in all groups: the root's place was left out."""
    joints_m, known = tables["xyz_m"], joints_are_known(tables)
    palms_m = np.stack([joints_m[:, palm].mean(axis=1) for palm in ([0, 9], [0, 5, 9, 13, 17], range(21))], axis=1)
    several, places_m = len(np.unique(tables["group"][known])) > 1, np.concatenate([joints_m, palms_m], axis=1)
    return known, np.full(len(known), several and (np.ptp(places_m[known], axis=0).max(axis=1) < 1e-6).any())


def hands_out_of_order(tables: Tables) -> Masks:
    """Hands with bones that no pose gives them.

    A phalanx is longer than the way from the wrist, or from the palm's centre, to the finger's knuckle, the thumb's
    than to the index finger's; or the last phalanges of the four fingers are longer than their first; or a joint is
    bent by 150 degrees, or a bone has no length. Of 3,000 rendered hands none is, with 5 mm of noise 0.1 %; in the
    orders "mano" and "peclr" of `skeleton.hand_rows`, with two joints of each finger swapped, or of the thumb, 90 % or
    more are. Or a knuckle is farther from its neighbour than from the next, or the thumb's from the index finger's than
    from the little finger's, or the thumb's tip is nearer to the wrist than its first joint: of all hands with two of
    four fingers swapped or with a reversed thumb, and 99 % with the four reversed; of none as they are, of 2.5 % with
    5 mm of noise.
    """
    joints_m = tables["xyz_m"]
    bones_m = joints_m[:, _ENDS] - joints_m[:, _STARTS]  # (N, 5, 4, 3)
    lengths_m = np.linalg.norm(bones_m, axis=3)
    long = (lengths_m[..., 1:].max(axis=2) > 1.2 * lengths_m[:, [1, 1, 2, 3, 4], 0]).any(axis=1)
    reversed_ = lengths_m[:, 1:, 3].sum(axis=1) > 1.2 * lengths_m[:, 1:, 1].sum(axis=1)
    bent = (bones_m[:, :, :-1] * bones_m[:, :, 1:]).sum(axis=3) <= -0.87 * lengths_m[:, :, :-1] * lengths_m[:, :, 1:]
    near_m, far_m = (np.linalg.norm(joints_m[:, _FIRST] - joints_m[:, other], axis=2) for other in (_NEAR, _FAR))
    swapped = (near_m >= 1.1 * far_m).any(axis=1)
    folded = bent.reshape(-1, 15)[:, 1:].any(axis=1)  # not the thumb's first joint, where the way from a palm turns
    return np.isfinite(lengths_m[:, 1:]).all(axis=(1, 2)), long | reversed_ | folded | swapped


def keypoints_out_of_order(tables: Tables) -> Masks:
    """All of 20 poses or more without 3D joints, if bones are long beside the ways from the middle of the keypoints.

    The median of the ratio is 0.77 for rendered hands and 0.79 for photographed ones, 0.93 or more if the order is
    reversed, or is "mano" or "peclr" of `skeleton.hand_rows`, or fingers begin at their tips.

    Or if joints that are neighbours in a hand are far from each other in the mean: of all sets of 20 rendered hands in
    which two fingers are swapped or the thumb is the last, of none as they are. A frame of a film that is like the one
    before is no further pose.
    """
    known = _most_are_known(tables["keypoints_px"])
    if "xyz_m" in tables or known.sum() < 20:
        return known, np.zeros(len(known), bool)
    points_px = tables["keypoints_px"][known]
    points_px = points_px - np.nanmean(points_px, axis=1, keepdims=True)
    shapes = points_px / np.fmax(np.nanmean(np.linalg.norm(points_px, axis=2), axis=1), 1e-9)[:, None, None]
    poses = 1 + (np.nanmean(np.linalg.norm(np.diff(shapes, axis=0), axis=2), axis=1) > 0.2).sum()
    ratio = np.nanmean(np.linalg.norm(shapes[:, _ENDS] - shapes[:, _STARTS], axis=3), axis=(1, 2))
    ways = np.linalg.norm(shapes[:, _FIRST, None] - shapes[:, np.transpose([_NEAR, _FAR])], axis=3)  # (N, 5, 2)
    near, far = np.nansum(ways + 0 * ways[..., ::-1], axis=0).T  # where both are known
    wrong = np.nanmedian(ratio) > 0.88 or (near > far * [0.45, 0.8, 0.8, 0.8, 1.1]).any()
    return known, np.full(len(known), wrong and poses >= 20)


def _most_are_known(points: AnyArray) -> BoolArray:
    """Mask (N,) of the hands of which more than 15 keypoints are known."""
    return np.asarray(np.isfinite(points).all(axis=2).sum(axis=1) > 15)


def hands_bent_back(tables: Tables) -> Masks:
    """Hands whose fingers point 24 degrees or more to the back of the hand, which depends on the side.

    Of 3,000 rendered hands none does; in a mirror, or with negated depths, 83 % do.
    """
    joints_m = tables["xyz_m"]
    palm = np.cross(joints_m[:, 5] - joints_m[:, 0], joints_m[:, 17] - joints_m[:, 0])  # where a right hand's looks
    tips_m = joints_m[:, 8::4] - joints_m[:, 5::4]
    reach = np.linalg.norm(tips_m, axis=2).sum(axis=1) * np.linalg.norm(palm, axis=1)
    forward = (tips_m.sum(axis=1) * palm).sum(axis=1) * np.where(tables["mirror"], -1, 1)
    return np.isfinite(forward), forward < -0.4 * reach


def keypoints_off_their_boxes(tables: Tables) -> Masks:
    """Hands with a keypoint five sides from its box's centre, most keypoints outside of it, or several at one place.

    Or one in the first pixel of the image, as keypoints without a label at 0, 0 or -1, -1; four on the same place; or
    all within a fifth of the box, as fractions of an image, or by focal lengths in millimetres. A box of one and a half
    times the side has room for tight boxes.
    """
    box_px, points_px = tables["box_px"], tables["keypoints_px"]
    offset_px = np.maximum(*np.moveaxis(np.abs(points_px - box_px[:, None, :2]), 2, 0))  # (N, K)
    known = ~np.isnan(offset_px)
    count = known.sum(axis=1)
    offset_px = np.where(known, offset_px, 0)
    outside = 2 * (offset_px > 0.75 * box_px[:, 2:]).sum(axis=1) > count
    places = np.sort(np.ascontiguousarray(points_px, np.float32).view(np.complex64)[..., 0], axis=1)
    same = (places[:, 3:] == places[:, :-3]).any(axis=1)
    with_all = np.where(known[..., None], points_px, box_px[:, None, :2])
    together = (count > 4) & ((with_all.max(axis=1) - with_all.min(axis=1)).max(axis=1) < 0.2 * box_px[:, 2])
    far_or_at_0 = (offset_px.max(axis=1) > 5.0 * box_px[:, 2]) | (np.abs(points_px).max(axis=2) <= 1).any(axis=1)
    return (box_px[:, 2] > 0) & (count > 0), outside | same | together | far_or_at_0


def keypoints_of_other_boxes(tables: Tables) -> Masks:
    """All of 20 hands or more, if the keypoints of most are not in the middle of their boxes, or many outside of them.

    Their middle is that of their range and their median. Boxes that are all the same, as at the images' centre, are not
    judged.
    """
    offset = (tables["keypoints_px"] - tables["box_px"][:, None, :2]) / tables["box_px"][:, None, 2:]  # in sides
    known = _most_are_known(offset)
    middle = (np.fmin.reduce(offset[known], axis=1) + np.fmax.reduce(offset[known], axis=1)) / 2
    off_middle = np.fmin(np.abs(middle), np.abs(np.nanmedian(offset[known], axis=1))).max(axis=1) > 0.25
    outside = (np.abs(offset[known]).max(axis=2) > 0.5).mean(axis=1) > 0.25
    differ = known.sum() >= 20 and np.ptp(tables["box_px"][known], axis=0).any()
    return known, np.full(len(known), differ and max(off_middle.mean(), outside.mean()) > 0.5)


def keypoints_of_other_images(tables: Tables) -> Masks:
    """Hands with exactly the keypoints of a hand of another group, or of the other side."""
    first, first_of = np.unique(_hash_of_rows(tables["keypoints_px"]), return_index=True, return_inverse=True)[1:]
    known = np.isfinite(tables["keypoints_px"]).all(axis=2).sum(axis=1) > 4  # of one, whole pixels are equal by chance
    return known, np.any([tables[name] != tables[name][first[first_of]] for name in ("group", "mirror")], axis=0)


def joints_apart_from_keypoints(tables: Tables) -> Masks:
    """Hands whose joints are projected 0.15 sides of the box from their keypoints in the mean, or one of them 0.5."""
    side_px, points_px = tables["box_px"][:, 2], tables["keypoints_px"]
    apart_px = np.linalg.norm(points_px - project_px(tables["K"], tables["xyz_m"]), axis=2)
    known = ~np.isnan(apart_px)  # (N, K)
    apart_px = np.where(known, apart_px, 0)
    wrong = (apart_px.sum(axis=1) > 0.15 * side_px * known.sum(axis=1)) | (apart_px.max(axis=1) > 0.5 * side_px)
    return known.any(axis=1) & (side_px > 0), wrong


RULES = (
    Rule(
        cameras_without_form,
        ("K",),
        "hands have no valid camera matrix K",
        f"Expected fx, fy, cx and cy in pixels of each hand with 3D joints, {CAMERA}. Add or "
        "mend them. Is K transposed?",
        most=0,
    ),
    Rule(
        joints_out_of_sight,
        ("xyz_m",),
        f"hands have joints behind the camera, or more than {_FARTHEST_M:g} m from it",
        "Expected depths above 0, in metres: x right, y down, z forward from the camera. Are these millimetres or "
        "centimetres? Mend the unit.",
        most=0,
    ),
    Rule(
        scales_of_no_bone,
        ("scale_m",),
        "lengths of the reference bone are not those of the 3D joints, or no metres",
        f"Expected labels of one set, and {_BONE_M[0]:g} to {_BONE_M[1]:g} m. Are these millimetres? Then divide by "
        "1000. Are depths missing? Else unpack the dataset again.",
        most=0,
    ),
    Rule(
        scales_of_other_hands,
        ("scale_m", "xyz_m"),
        "lengths of the reference bone are not those of the 3D joints",
        "Expected the same length. Are rows shifted? Use labels of one set.",
        most=1,
    ),
    Rule(
        joints_of_no_hand,
        ("xyz_m",),
        "hands are of a size that no hand has",
        f"Expected metres: {_HAND_BONE_M[0]:g} to {_HAND_BONE_M[1]:g} m from middle_mcp to middle_pip. Mend the unit.",
    ),
    Rule(
        boxes_without_numbers,
        ("box_px",),
        "boxes are not valid",
        "Expected finite pixels and a side above 0. Mend the boxes, or the labels that they are made from.",
        most=0,
    ),
    Rule(
        cameras_beside_boxes,
        ("K", "box_px"),
        "cameras look past their boxes",
        "Expected cx and cy in pixels, in the image or near it. Mend them.",
    ),
    Rule(
        sizes_of_labels,
        ("size_px", "labelled_size_px"),
        "images have another size than their labels say",
        "Expected width and height of the image as displayed. Were the labels made before EXIF turned the images? Then "
        "turn the labels; else use images and labels of one size.",
        most=0,
    ),
    Rule(
        sizes_that_differ,
        ("common_size_px",),
        "images have another size than the first",
        "Expected one size. Unpack the dataset again.",
        most=0,
    ),
    Rule(
        cameras_of_other_sizes,
        ("common_size_px", "K", "keypoints_px"),
        "images have another size than their labels",
        "Expected the camera's centre, or the hand's, near the middle of the image. Use images and labels of one size. "
        "Or were the labels made before EXIF turned the images? Then turn them.",
        most=0,
    ),
    Rule(
        cameras_off_centre,
        ("size_px", "K", "keypoints_px"),
        "cameras and hands are far from the middle of their images",
        "Expected one of them there, unless these are parts of larger images. Do the cameras belong to images of "
        "another size, or to these before EXIF turned them?",
        most=1,
    ),
    Rule(
        hands_out_of_order,
        ("xyz_m",),
        "hands have fingers that no hand has",
        "Expected the wrist, then each finger from the knuckle to the tip, the thumb first. Is this another published "
        "order, such as MANO's, which HO-3D has, with the tips last? Then reorder the joints. Are depths missing?",
    ),
    Rule(
        joints_at_one_place,
        ("xyz_m", "group"),
        "hands are in a set with one of the joints, or their middle, at the same place in all images",
        "Expected the camera's frame. Are the joints relative to the wrist or the palm? Then add where it is.",
        most=1,
    ),
    Rule(
        keypoints_out_of_order,
        ("keypoints_px",),
        "hands are in a set whose bones look too long, or whose fingers look confused",
        "Expected the wrist, then each finger from the knuckle to the tip, the thumb first. If most hands are fists, "
        "this is right; else reorder the keypoints.",
        most=1,
    ),
    Rule(
        hands_bent_back,
        ("xyz_m", "mirror"),
        "hands have fingers that are bent to the back of the hand",
        "Expected x right, y down, z forward from the camera, and left hands that are named so. Are left and right "
        "confused, are joints mirrored, or is z negated?",
    ),
    Rule(
        boxes_without_pixels,
        ("box_px",),
        "boxes show nothing of their images",
        "Expected pixels of the image as displayed. Are these fractions of the image?",
    ),
    Rule(
        boxes_of_both_sides,
        ("box_px", "mirror", "group"),
        "boxes are those of a right hand and of a left one",
        "Expected one hand in each box, or boxes of their own. Remove the wrong hand.",
    ),
    Rule(
        boxes_beyond_images,
        ("box_px", "size_px"),
        "boxes are mostly outside of their images",
        "Expected pixels of the image as displayed. Do they belong to images of another size, or to these before EXIF "
        "turned them?",
    ),
    Rule(
        boxes_in_a_corner,
        ("box_px", "size_px"),
        "boxes are in a set that is in the upper left of its images",
        "Expected pixels of the image as displayed. Do they belong to smaller images, or are they in percent? If hands "
        "are there, this is right.",
        most=1,
    ),
    Rule(
        keypoints_off_their_boxes,
        ("keypoints_px", "box_px"),
        "hands have keypoints far from their boxes or at one place, or fill less than a fifth of the box",
        "Expected boxes around hands and keypoints, x before y, in pixels of the image as displayed, not fractions. "
        "Are cameras of images of another size, or in millimetres? "
        "Are keypoints at 0, 0 or -1, -1 not labelled? Leave out the hand.",
    ),
    Rule(
        keypoints_of_other_boxes,
        ("keypoints_px", "box_px"),
        "hands are in a set whose keypoints are beside their boxes",
        "Expected the keypoints of each box within it. Do boxes or keypoints belong to images of another size, or to "
        "another row?",
        most=1,
    ),
    Rule(
        keypoints_of_other_images,
        ("keypoints_px", "mirror", "group"),
        "hands have exactly the keypoints of a hand of another image, or of the other side",
        "Expected this only in copies or versions of one image. Are rows shifted? Mend the labels.",
        most=1,
    ),
    Rule(
        joints_apart_from_keypoints,
        ("keypoints_px", "K", "xyz_m", "box_px"),
        "hands have 3D joints that are not projected to their keypoints",
        "Expected the same points in the same order, from the wrist on. Mend the joints, or fx, fy, cx and cy.",
    ),
)
"""All rules, in the order in which they are tried: a wrong camera makes wrong boxes."""


@dataclass(frozen=True)
class Fault:
    """What a rule finds in an index.

    Attributes:
        rows: (M,) the wrong samples, at least one.
        judged: number of samples that the rule could judge.
        shown: the tables whose rows are shown, (N, ...) each.
    """

    rule: Rule
    index: Index
    rows: IntArray
    judged: int
    shown: dict[str, AnyArray]

    @property
    def found(self) -> str:
        """How many of how many samples are wrong, and what is."""
        return f"{len(self.rows)} of {self.judged} {self.rule.found}"

    def numbers(self, row: int) -> str:
        """A sample's first numbers in the tables that are shown."""
        words = [f"row {row}"]
        for name, table in self.shown.items():
            words.append(f"{name} {', '.join(f'{number:g}' for number in table[row].ravel()[:9].tolist())}")
        return "; ".join(words)

    def __str__(self) -> str:
        place, first = self.index.label_file or self.index.root, int(self.rows[0])
        example = f"{self.index.paths[first]} ({self.numbers(first)})"
        return f"{place}: {self.found}, the first is {example}. {self.rule.expected}"


def validate(index: Index) -> None:
    """Judge the labels of an index by all rules. The sizes of a few images are read.

    A warning counts what a rule finds, if other samples may be right.

    Raises:
        UserError: a rule finds so many wrong samples that nothing can be right.
    """
    boxed = np.flatnonzero(index.box_px[:, 2] > 0)
    rows = boxed[spread(len(boxed), 64)]
    size_px = np.full((len(index), 2), np.nan)
    headers = image_headers(index.read_many(rows.tolist()))
    size_px[rows] = upright_size_px(headers[:, :2], headers[:, 2])[:, ::-1]
    if turned := np.count_nonzero(headers[:, 2] > 1):
        _log.info(
            "%s: EXIF turns %d of %d images that were looked at; boxes and labels must belong to the turned images",
            *(index.label_file or index.root, turned, len(rows)),
        )
    size_px[size_px == 0] = np.nan  # of an image that cannot be read
    for fault in find_faults(index, size_px):
        if len(fault.rows) > fault.rule.most * fault.judged:
            raise UserError(str(fault))
        _log.warning(
            "%s They are used as they are%s",
            *(fault, "; 'python cli.py check-data' lists them, to leave out" if fault.rule.most < 1 else ""),
        )


def find_faults(index: Index, size_px: DoubleArray) -> Iterator[Fault]:
    """What the rules find in an index, in their order.

    Args:
        size_px: (N, 2), width and height of the images as displayed, NaN where they are not known.
    """
    tables: dict[str, AnyArray] = {"size_px": size_px, "mirror": index.mirrored, **index.tables}
    if index.one_size:
        tables["common_size_px"] = size_px
    for rule in RULES:
        if all(name in tables for name in rule.tables):
            with np.errstate(all="ignore"):  # labels may be any numbers
                judged, wrong = rule.masks(tables)
            rows = np.flatnonzero(judged & wrong)
            if len(rows):
                yield Fault(rule, index, rows, int(judged.sum()), {name: tables[name] for name in rule.tables[:2]})
