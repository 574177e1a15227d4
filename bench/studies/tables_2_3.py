"""Tables 2 and 3: fine-tuning at high resolution, and images of a source whose labels were not seen.

    python -m peclr_dali.bench.studies.tables_2_3 --scale small

At scale small a ResNet-18 stands for the ResNet-152, 72 pixels after 48 for 224 after 128, and rendered hands in other
scenes for YouTube3DHands. A pre-training takes 20 minutes of one core without bf16, as estimated; both tables share it.
"""

from __future__ import annotations

from typing import Final

from peclr_dali.bench.studies.run import main
from peclr_dali.bench.studies.study import (
    ALL_LABELS,
    FREIHAND,
    HANDS_3500,
    RUNS,
    SCALES,
    YOUTUBE_3D_HANDS,
    Arm,
    Claim,
    ScaleName,
    Studies,
    Study,
    hands,
)

SECOND: Final = {"small": hands(3500, 3, 40), "paper": YOUTUBE_3D_HANDS}  # small: other hands, in other scenes
RN50: Final = "encoder.name=resnet50"


def two_sources(scale: ScaleName) -> dict[str, Arm]:
    """Pre-trainings on both sources."""
    if scale == "small":
        return {"two": Arm(["train.epochs=2"], (HANDS_3500, SECOND[scale]))}  # of twice as many images
    data = (FREIHAND, SECOND[scale])
    return {"two": Arm(data=data), "two_rn50": Arm([RN50], data)}


def high_resolution(scale: ScaleName) -> Study:
    """Table 2: the best networks, with 224 pixels and PeCLR on both sources."""
    measured = {
        "rn152_224": Arm(published={"pa_epe_cm": 0.74, "pa_auc": 0.85}),
        "rn152_224_peclr": Arm(start="two", published={"pa_epe_cm": 0.66, "pa_auc": 0.87}),
    }
    compare = [  # caption: "14.5% / 10.8% for RN50 and RN152"
        Claim("rn152_224_peclr", "rn152_224", "pa_epe_cm", percent=10.8),
        Claim("rn152_224_peclr", "rn152_224", "pa_auc"),
    ]
    if scale == "paper":
        measured |= {
            "rn50_224": Arm([RN50], published={"pa_epe_cm": 0.83, "pa_auc": 0.84}),
            "rn50_224_peclr": Arm([RN50], start="two_rn50", published={"pa_epe_cm": 0.71, "pa_auc": 0.86}),
        }
        compare.append(Claim("rn50_224_peclr", "rn50_224", "pa_epe_cm", percent=14.5))
    pretrain = two_sources(scale)
    return Study("high_resolution", ALL_LABELS[scale], RUNS / "pose" / scale, measured, pretrain, compare, seeds=(0, 1))


def cross_domain(scale: ScaleName) -> Study:
    """Table 3: FreiHAND, and YouTube3DHands as the second source, with the networks of Table 2."""
    peclr, none, second = "rn152_224_peclr", "rn152_224", SECOND[scale]
    measured = {
        none: Arm(published={"epe_cm": 5.05, "auc": 0.34}),
        peclr: Arm(start="two", published={"epe_cm": 4.56, "auc": 0.36}),
        "rn152_on_second": Arm(network=none, on=second, published={"pa_epe_cm": 3.05, "epe_px": 22.1}),
        "rn152_peclr_on_second": Arm(network=peclr, on=second, published={"pa_epe_cm": 2.88, "epe_px": 16.9}),
    }
    compare = [
        Claim(peclr, none, "epe_cm", percent=9.7),
        Claim(peclr, none, "auc", percent=5.6),
        Claim("rn152_peclr_on_second", "rn152_on_second", "pa_epe_cm", percent=5.6),
        Claim("rn152_peclr_on_second", "rn152_on_second", "epe_px", percent=23.5),
    ]
    pretrain = two_sources(scale)
    return Study("cross_domain", ALL_LABELS[scale], RUNS / "pose" / scale, measured, pretrain, compare, seeds=(0, 1))


STUDIES: Final[Studies] = {scale: [high_resolution(scale), cross_domain(scale)] for scale in SCALES}

if __name__ == "__main__":
    main(STUDIES)
