"""Figure 6: single augmentations, and PeCLR against SimCLR under one geometric augmentation, on a frozen encoder.

python -m peclr_dali.bench.studies.figure_6 --scale small
"""

from __future__ import annotations

from typing import Final

from peclr_dali.bench.studies.run import main
from peclr_dali.bench.studies.study import FROZEN, RUNS, SCALES, Arm, Claim, ScaleName, Studies, Study
from peclr_dali.bench.studies.table_1 import RANDOM

NOTHING: Final = (
    "geometry.rotation_deg=[0.0, 0.0]", "geometry.translation_frac=0.0", "geometry.scale=[1.0, 1.0]",
    "colour.jitter=none", "appearance.colour_drop_probability=0.0", "equivariance.variant=none",
)  # fmt: skip
"""No augmentation, and SimCLR's loss."""

ROTATION: Final = {  # rendered hands have every direction
    "small": "geometry.rotation_deg=[-180.0, 180.0]",
    "paper": "geometry.rotation_deg=[-45.0, 45.0]",
}
TRANSLATION: Final = "geometry.translation_frac=0.1171875"
PECLR: Final = "equivariance.variant=paper"


def single_augmentations(scale: ScaleName) -> Study:
    """Figure 6a, section 4.3: which single augmentation gives SimCLR the best features? Figure only, no number.

    "Encoders trained with transformations perform better than random initialization", and "rotation transformation
    leads to particularly bad performance". Small: 10 pre-trainings, of which `geometric` shares two, and 11 heads, two
    seeds: 142 minutes.
    """
    alone = {
        "scale": {"small": "geometry.scale=[0.8, 1.25]", "paper": "geometry.scale=[0.6, 2.0]"}[scale],
        "rotation_simclr": ROTATION[scale],
        "translation_simclr": TRANSLATION,
        "crop": "geometry.crop_probability=0.5",
        "colour_jitter": "colour.jitter=hsv",
        "colour_drop": "appearance.colour_drop_probability=0.5",
        "cut_out": "appearance.cut_out_probability=0.5",
        "blur": "appearance.blur_probability=0.5",
        "noise": "appearance.noise_probability=0.5",
        "sobel": "appearance.sobel_probability=0.5",
    }
    pretrain = {name: Arm([*NOTHING, key]) for name, key in alone.items()}
    measured = {"random": RANDOM, **{name: Arm(start=name) for name in alone}}
    compare = [Claim(name, "random") for name in alone]
    compare += [Claim(name, "rotation_simclr") for name in alone if name != "rotation_simclr"]
    folder = RUNS / "shared" / scale
    return Study("single_augmentations", FROZEN[scale], folder, measured, pretrain, compare, seeds=(0, 1))


def geometric(scale: ScaleName) -> Study:
    """Figure 6b, section 4.3: PeCLR against SimCLR under rotation alone, and under translation alone.

    And how to undo a translation in latent space: normalised by the latent range, or direct (supplement, "Normalizing
    translation": directly applying it performs "worse than SimCLR", and scaling "leads to superior performance"). The
    bars have no numbers; the text has the improvements, without the name of the error. Here it is the 2D error.

    Small: 6 minutes of one core for each of 5 pre-trainings, 1 for each of 6 heads; three seeds: 108 minutes.
    """
    pretrain = {
        "rotation_peclr": Arm([*NOTHING, PECLR, ROTATION[scale]]),
        "rotation_simclr": Arm([*NOTHING, ROTATION[scale]]),
        "translation_peclr": Arm([*NOTHING, PECLR, TRANSLATION]),
        "translation_simclr": Arm([*NOTHING, TRANSLATION]),
        "translation_direct": Arm([*NOTHING, "equivariance.variant=direct", TRANSLATION]),
    }
    measured = {**{name: Arm(start=name) for name in pretrain}, "random": RANDOM}
    compare = [
        Claim("rotation_peclr", "rotation_simclr", percent=57),  # "34% and 57% relative to SimCLR, respectively"
        Claim("translation_peclr", "translation_simclr", percent=34),
        Claim("translation_peclr", "translation_direct"),
        Claim("translation_simclr", "translation_direct"),
        # No claims of the paper:
        Claim("rotation_peclr", "random"),
        Claim("translation_peclr", "random"),
    ]
    return Study("geometric", FROZEN[scale], RUNS / "shared" / scale, measured, pretrain, compare)


STUDIES: Final[Studies] = {scale: [single_augmentations(scale), geometric(scale)] for scale in SCALES}

if __name__ == "__main__":
    main(STUDIES)
