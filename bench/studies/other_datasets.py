"""The supplement: HO-3D and Dexter+Object (section 5), and maps of the equivariance error (section 6).

python -m peclr_dali.bench.studies.other_datasets --scale small
"""

from __future__ import annotations

from typing import Final

from peclr_dali.bench.studies.run import main
from peclr_dali.bench.studies.study import ALL_LABELS, FROZEN, RUNS, Arm, Claim, Dataset, ScaleName, Studies, Study
from peclr_dali.bench.studies.table_1 import BEST
from peclr_dali.bench.studies.tables_2_3 import PRETRAIN, RN50

HO_3D: Final = Dataset("data/ho3d", ("data.source=ho3d",), held_out=("data.split=val",))
DEXTER_OBJECT: Final = Dataset("data/dexter_object", ("data.source=dexter_object",), held_out=("data.split=all",))


def other_datasets() -> Study:
    """Fine-tuning on another dataset, and a dataset that no network was trained on. Two tables.

    HO-3D has ResNet-50 in the paper; its figures come from the online evaluation, so they are of its evaluation part,
    and here of its held-out recordings. Dexter+Object has the networks of Table 2 and the aligned AUC.
    """
    keys, supervised = (RN50, "data.split=train"), {"pa_epe_cm": 1.33, "pa_auc": 0.74, "epe_cm": 2.85, "auc": 0.50}
    peclr = {"pa_epe_cm": 1.09, "pa_auc": 0.78, "epe_cm": 2.26, "auc": 0.58}
    measured = {
        "ho3d": Arm(keys, (HO_3D,), published=supervised),
        "ho3d_peclr": Arm(keys, (HO_3D,), start="two_rn50", published=peclr),
        "rn152_224": Arm(),
        "rn152_224_peclr": Arm(start="two"),
        "dexter": Arm(network="rn152_224", on=DEXTER_OBJECT, published={"pa_auc": 0.77}),
        "dexter_peclr": Arm(network="rn152_224_peclr", on=DEXTER_OBJECT, published={"pa_auc": 0.81}),
    }
    compare = [
        Claim("ho3d_peclr", "ho3d", "pa_epe_cm", percent=18),  # "an improvement of 18% in 3D PA-EPE"
        Claim("dexter_peclr", "dexter", "pa_auc", percent=4.9),  # "improvements of 4.9%, almost reaching parity"
    ]
    return Study("other_datasets", ALL_LABELS, RUNS / "pose" / "paper", measured, PRETRAIN, compare, seeds=(0, 1))


def equivariance(scale: ScaleName) -> Study:
    """Where are PeCLR and SimCLR equivariant? Figures only, no number.

    "L_improv is positive for the entire range tested", for rotation and for translation. The paper's networks are
    pre-trained on FreiHAND and YouTube3DHands and fine-tuned on FreiHAND. Here: pre-trained on FreiHAND, frozen, with a
    head on FreiHAND. Small: the networks of Table 1, and 1.5 minutes of one core for the maps of each.
    """
    measured = {"peclr": Arm(start="peclr"), "simclr": Arm(start="simclr_best")}
    return Study("equivariance", FROZEN[scale], RUNS / "shared" / scale, measured, BEST, maps=True)


STUDIES: Final[Studies] = {"small": [equivariance("small")], "paper": [other_datasets(), equivariance("paper")]}

if __name__ == "__main__":
    main(STUDIES)
