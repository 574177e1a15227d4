"""Figure 7 and the supplement's: how many labels does pre-training save?

python -m peclr_dali.bench.studies.figure_7 --scale small
python -m peclr_dali.bench.studies.figure_7 --scale paper --list
"""

from __future__ import annotations

from typing import Final, Literal

from peclr_dali.bench.studies.run import main
from peclr_dali.bench.studies.study import FREIHAND_VAL, RUNS, SMALL, TWO_SOURCES, Arm, Claim, Scale, Studies, Study

SHARES: Final = {"010": 0.1, "020": 0.2, "040": 0.4, "060": 0.6, "080": 0.8, "100": 1.0}


def label_fractions(network: Literal["rn152", "rn50"]) -> Study:
    """Figure 7, section 4.4: scratch, PeCLR on one source, PeCLR on two, with shares of the labels.

    ResNet-152; the supplement has the same with ResNet-50. The figures have no numbers, but for the percentages below.
    Pre-training also sees the images of the part that is held out, without labels: Table 2 shares its networks.
    """
    name, folder, percent = {
        # "improvements of up to 43% in 3D EPE in the lowest labeled setting" (section 1)
        "rn152": ("label_fractions", "pose", {("two_020", "one_020"): 20.0, ("two_010", "scratch_010"): 43.0}),
        "rn50": ("label_fractions_rn50", "pose_rn50", {("two_020", "one_020"): 8.6}),
    }[network]  # two sources over one: supplement, section 4
    at = Scale(
        FREIHAND_VAL,  # the evaluation was online only
        measured=("geometry.side_px=128", "encoder.weights=imagenet"),  # section 4.1: 128 pixels in section 4.4
        pretrain_files=(f"configs/peclr_{network}.toml",),
        measured_files=(f"configs/finetune_{network}.toml",),
        processes=8,
    )
    pretrain = {"one": Arm(), "two": Arm(data=TWO_SOURCES)}
    labels = {share: [f"data.label_fraction={fraction}"] for share, fraction in SHARES.items()}
    pairs = [("one", "scratch"), ("two", "scratch"), ("two", "one")]
    compared = [(f"{better}_{share}", f"{than}_{share}") for share in SHARES for better, than in pairs]
    compare = [
        *(Claim(*pair, "epe_cm", percent.get(pair)) for pair in compared),
        *(Claim(f"one_{share}", f"scratch_{share}", "pa_epe_cm") for share in ("010", "020", "040", "100")),
        # "for 20% of labeled data, M_FH+YT3D performs almost on par with M_b using 40% of labeled data"
        Claim("scratch_040", "two_020", "epe_cm"),
    ]
    return Study(name, at, RUNS / folder / "paper", Arm.by_labels(pretrain, labels), pretrain, compare, seeds=(0, 1))


FEW: Final = {  # every fine-tuning takes about 400 steps
    "005": ("data.label_fraction=0.005", "train.epochs=200"),
    "010": ("data.label_fraction=0.01", "train.epochs=100"),
    "030": ("data.label_fraction=0.03", "train.epochs=33"),
    "100": ("data.label_fraction=0.1", "train.epochs=10"),
    "all": ("data.label_fraction=1.0", "train.epochs=1"),
}

STARTS: Final = {
    "simclr": Arm(["equivariance.variant=none"]),
    "peclr": Arm(),
    "version": Arm(["data.positive=version"]),
}


def few_labels() -> Study:
    """What is pre-training worth where labels are few? Only at scale small; Figure 7 is the nearest in the paper.

    Written before the first run, for 3 % of the labels: PeCLR is better than no pre-training; than SimCLR with the same
    augmentations; and PeCLR with another version of the pose as positive is better than PeCLR. All else is secondary.

    Minutes of one core with instructions for bf16: 6 for a pre-training, 0.3 for a fine-tuning. Its rate is the best of
    1e-3, 3e-3, 6e-3 and 1e-2 at 3 % of the labels with run.seed = 100, from random numbers, PeCLR and another version
    alike.
    """
    pairs = [("peclr", "scratch"), ("peclr", "simclr"), ("version", "peclr"), ("version", "scratch")]
    compare = [Claim(f"{better}_{share}", f"{than}_{share}") for share in FEW for better, than in pairs]
    measured, folder = Arm.by_labels(STARTS, FEW), RUNS / "shared" / "small"
    return Study("few_labels", SMALL, folder, measured, STARTS, compare, seeds=range(6), pretrain_seeds=3)


STUDIES: Final[Studies] = {"small": [few_labels()], "paper": [label_fractions("rn152"), label_fractions("rn50")]}

if __name__ == "__main__":
    main(STUDIES)
