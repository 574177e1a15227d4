"""The columns of the table of draws: the random numbers of a view, of which each augmentation has its own."""

from enum import CONTINUOUS, UNIQUE, IntEnum, verify


@verify(UNIQUE, CONTINUOUS)
class Draw(IntEnum):
    """Columns of the table of draws. A new one takes the next number, so that the others do not change.

    A number that is taken, and one that leaves a gap, are refused when this file is imported. A column named like an
    augmentation of `appearance.AppearanceConfig` is 1 if it is applied, else 0.
    """

    ANGLE_DEG = 0
    SHIFT_X_FRAC = 1
    SHIFT_Y_FRAC = 2
    MAGNIFICATION = 3
    HUE = 4
    SATURATION = 5
    VALUE_SCALE = 6
    VALUE_SHIFT = 7
    COLOUR_DROP = 8
    SOBEL = 9
    CUT_OUT = 10
    CUT_OUT_SIDE_PX = 11  # whole pixels of the view, so that every renderer cuts out the same pixels
    CUT_OUT_LEFT_PX = 12
    CUT_OUT_TOP_PX = 13
    CUT_OUT_GREY = 14
    BLUR = 15
    BLUR_SIGMA_PX = 16
    NOISE = 17
    NOISE_KEY_HIGH = 18  # 16 bits each: float32 holds them exactly
    NOISE_KEY_LOW = 19
    CROP = 20  # 1 if applied, else 0
    CROP_SIDE_FRAC = 21
    CROP_X_FRAC = 22  # centre of the crop, from the centre of the canonical view, as a fraction of its side
    CROP_Y_FRAC = 23
    FLIP = 24  # 1 if applied, else 0
