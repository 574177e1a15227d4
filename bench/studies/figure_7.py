"""Figure 7 and the supplement's: how many labels does pre-training save?

python -m peclr_dali.bench.studies.figure_7 --scale small
python -m peclr_dali.bench.studies.figure_7 --scale paper --list
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final, Literal

from peclr_dali.bench.studies.run import main
from peclr_dali.bench.studies.study import (
    FREIHAND,
    FREIHAND_VAL,
    FROZEN,
    RUNS,
    SMALL_FINETUNE,
    YOUTUBE_3D_HANDS,
    Arm,
    Claim,
    Scale,
    Studies,
    Study,
    hands,
)
from peclr_dali.bench.studies.table_1 import BEST

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
    pretrain = {"one": Arm(), "two": Arm(data=(FREIHAND, YOUTUBE_3D_HANDS))}
    measured = {
        f"{start}_{share}": Arm([f"data.label_fraction={fraction}"], start=start if start in pretrain else None)
        for share, fraction in SHARES.items()
        for start in ("scratch", *pretrain)
    }
    pairs = [("one", "scratch"), ("two", "scratch"), ("two", "one")]
    compared = [(f"{better}_{share}", f"{than}_{share}") for share in SHARES for better, than in pairs]
    compare = [
        *(Claim(*pair, "epe_cm", percent.get(pair)) for pair in compared),
        *(Claim(f"one_{share}", f"scratch_{share}", "pa_epe_cm") for share in ("010", "020", "040", "100")),
        # "for 20% of labeled data, M_FH+YT3D performs almost on par with M_b using 40% of labeled data"
        Claim("scratch_040", "two_020", "epe_cm"),
    ]
    return Study(name, at, RUNS / folder / "paper", measured, pretrain, compare, seeds=(0, 1))


FEW: Final = {  # every fine-tuning takes about 400 steps
    "005": ("data.label_fraction=0.005", "train.epochs=200"),
    "010": ("data.label_fraction=0.01", "train.epochs=100"),
    "030": ("data.label_fraction=0.03", "train.epochs=33"),
    "100": ("data.label_fraction=0.1", "train.epochs=10"),
    "all": ("data.label_fraction=1.0", "train.epochs=1"),
}

SWITCHES: Final = {  # of PeCLR, one at a time: two pre-trainings of each
    "no_translation": Arm(["geometry.translation_frac=0.0"]),  # the latent shift is 0 then
    "no_scale": Arm(["geometry.scale=[1.0, 1.0]"]),
    "no_rotation": Arm(["geometry.rotation_deg=[0.0, 0.0]"]),
    "rotation_45": Arm(["geometry.rotation_deg=[-45.0, 45.0]"]),  # as in the paper
    "simclr_best": BEST["simclr_best"],
    "no_colour": Arm(["colour.jitter=none", "appearance.colour_drop_probability=0.0"]),
    "temperature_050": Arm(["loss.temperature=0.5"]),  # as in the paper
    # the paper's rule for the rate: as the root of the batch
    "batch_128": Arm(["train.batch=128", "train.micro_batch=128", "optim.lr=1.4e-3"]),
    "batch_512": Arm(["train.batch=512", "train.micro_batch=512", "optim.lr=2.8e-3"]),
    "batch_1024": Arm(["train.batch=1024", "train.micro_batch=1024", "optim.lr=4e-3"]),  # 240 steps
    "lars_off": Arm(["optim.trust_coefficient=1e6"]),  # the factor is then 1 for every tensor: Adam alone
    "scenes_4": Arm(data=(hands(3600, 3, 4),)),  # all poses before the same four scenes
    "scenes_3600": Arm(data=(hands(3600, 3, 3600),)),  # each pose before a scene of its own
}


def few_labels() -> Study:
    """What is pre-training worth where labels are few? Only at scale small; Figure 7 is the nearest in the paper.

    Written before the first run, for 3 % of the labels: PeCLR is better than no pre-training; than SimCLR with the same
    augmentations; and PeCLR with another version of the pose as positive is better than PeCLR. All else is secondary.

    The recorded rows have three pre-trainings of each arm. With 3 % of the labels, most are fine-tuned from each with
    six seeds (--seeds 0,1,...,17); with other shares, with two; `frozen` with one; SWITCHES from two pre-trainings with
    two seeds each (--seeds 0,1,3,4). Minutes of one core with instructions for bf16: 6 for 20 epochs of pre-training,
    20 for 60, 0.3 for a fine-tuning. Its rate is the best of 1e-3, 3e-3, 6e-3 and 1e-2 at 3 % of the labels with
    run.seed = 100, from random numbers, PeCLR and another version alike.
    """
    starts: dict[str, list[str]]
    starts = {"simclr": ["equivariance.variant=none"], "peclr": [], "version": ["data.positive=version"]}
    longer = {f"{name}_60": Arm([*keys, "train.epochs=60"]) for name, keys in starts.items()}
    measured = {}
    for share, keys in FEW.items():
        measured[f"scratch_{share}"] = Arm(keys)
        measured[f"frozen_{share}"] = Arm([*keys, "train.frozen=true"])
        measured |= {f"{name}_{share}": Arm(keys, start=name) for name in starts}
    measured |= {f"{name}_030": Arm(FEW["030"], start=name) for name in longer}
    measured |= {name: Arm(FEW["030"], start=name) for name in SWITCHES}
    frozen = ["train.frozen=true", "pose.features=layer2"]  # ridge regression on features in cells, all labels
    measured |= {f"cells_{name}": Arm(frozen, start=name, by="probe") for name in ("peclr", "version")}
    pairs = [("peclr", "scratch"), ("peclr", "simclr"), ("version", "peclr"), ("version", "scratch")]
    compare = [
        *(Claim(f"{better}_{share}", f"{than}_{share}") for share in FEW for better, than in pairs),
        *(Claim(f"{name}_60_030", "scratch_030") for name in ("peclr", "version")),
        Claim("peclr_60_030", "simclr_60_030"),
        Claim("version_60_030", "peclr_60_030"),
        *(Claim(f"{name}_60_030", f"{name}_030") for name in starts),
        Claim("cells_version", "cells_peclr"),
        *(Claim(name, "peclr_030") for name in SWITCHES),
    ]
    pretrain = {**{name: Arm(keys) for name, keys in starts.items()}, **longer, **SWITCHES}
    finetuned = (*SMALL_FINETUNE, "encoder.name=timm/test_resnet", "optim.lr=6e-3")
    at, folder = replace(FROZEN["small"], measured=finetuned), RUNS / "shared" / "small"
    return Study("few_labels", at, folder, measured, pretrain, compare, seeds=range(6), pretrain_seeds=3)


STUDIES: Final[Studies] = {
    "small": [few_labels()],
    "paper": [label_fractions("rn152"), label_fractions("rn50")],
}

if __name__ == "__main__":
    main(STUDIES)
