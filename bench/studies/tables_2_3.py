"""Tables 2 and 3: fine-tuning at high resolution, and images of a source whose labels were not seen.

python -m peclr_dali.bench.studies.tables_2_3 --list
"""

from __future__ import annotations

from typing import Final

from peclr_dali.bench.studies.run import main
from peclr_dali.bench.studies.study import ALL_LABELS, RUNS, TWO_SOURCES, YOUTUBE_3D_HANDS, Arm, Claim, Studies, Study

RN50: Final = "encoder.name=resnet50"
PRETRAIN: Final = {"two": Arm(data=TWO_SOURCES), "two_rn50": Arm([RN50], data=TWO_SOURCES)}


def high_resolution() -> Study:
    """Table 2: the best networks, with 224 pixels and PeCLR on both sources."""
    measured = {
        "rn152_224": Arm(published={"pa_epe_cm": 0.74, "pa_auc": 0.85}),
        "rn152_224_peclr": Arm(start="two", published={"pa_epe_cm": 0.66, "pa_auc": 0.87}),
        "rn50_224": Arm([RN50], published={"pa_epe_cm": 0.83, "pa_auc": 0.84}),
        "rn50_224_peclr": Arm([RN50], start="two_rn50", published={"pa_epe_cm": 0.71, "pa_auc": 0.86}),
    }
    compare = [  # caption: "14.5% / 10.8% for RN50 and RN152"
        Claim("rn152_224_peclr", "rn152_224", "pa_epe_cm", percent=10.8),
        Claim("rn152_224_peclr", "rn152_224", "pa_auc"),
        Claim("rn50_224_peclr", "rn50_224", "pa_epe_cm", percent=14.5),
    ]
    folder = RUNS / "pose" / "paper"
    return Study("high_resolution", ALL_LABELS, folder, measured, PRETRAIN, compare, seeds=(0, 1))


def cross_domain() -> Study:
    """Table 3: FreiHAND, and YouTube3DHands as the second source, with the networks of Table 2."""
    peclr, none, second = "rn152_224_peclr", "rn152_224", YOUTUBE_3D_HANDS
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
    return Study("cross_domain", ALL_LABELS, RUNS / "pose" / "paper", measured, PRETRAIN, compare, seeds=(0, 1))


STUDIES: Final[Studies] = {"paper": [high_resolution(), cross_domain()]}

if __name__ == "__main__":
    main(STUDIES)
