"""Table 1: PeCLR against SimCLR, each with its best composition of augmentations, on a frozen encoder.

python -m peclr_dali.bench.studies.table_1 --scale small
"""

from __future__ import annotations

from typing import Final

from peclr_dali.bench.studies.run import main
from peclr_dali.bench.studies.study import FROZEN, RUNS, SCALES, Arm, Claim, ScaleName, Studies, Study

BEST: Final = {
    "peclr": Arm(),
    # "SimCLR performs best with scale and color jitter"
    "simclr_best": Arm(
        ["equivariance.variant=none", "geometry.rotation_deg=[0.0, 0.0]", "geometry.translation_frac=0.0"]
    ),
}
"""The best compositions of augmentations."""

RANDOM: Final = Arm(["encoder.weights=random"])
"""An encoder that was not trained."""


def compositions(scale: ScaleName) -> Study:
    """Table 1, measured by the paper's two-layer MLP.

    Small, minutes of one core with instructions for bf16: 6 for each of 2 pre-trainings, 1 for each of 3 heads; three
    seeds: 45 minutes, of which 18 are shared with few_labels.
    """
    measured = {
        "simclr": Arm(start="simclr_best", published={"epe_cm": 16.62, "auc": 0.72, "epe_px": 12.05}),
        "peclr": Arm(start="peclr", published={"epe_cm": 16.05, "auc": 0.74, "epe_px": 10.51}),
        "random": RANDOM,
    }
    compare = [
        # section 4.3: "improvements of 3.4% in terms of 3D EPE and 12.8% in terms of 2D EPE"
        Claim("peclr", "simclr", "epe_cm", percent=3.4),
        Claim("peclr", "simclr", "auc"),
        Claim("peclr", "simclr", "epe_px", percent=12.8),
        Claim("peclr", "random"),
    ]
    return Study("compositions", FROZEN[scale], RUNS / "shared" / scale, measured, BEST, compare)


STUDIES: Final[Studies] = {scale: [compositions(scale)] for scale in SCALES}

if __name__ == "__main__":
    main(STUDIES)
