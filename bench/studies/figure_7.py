"""Figure 7 and the supplement's: how many labels does pre-training save?"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from peclr_dali.bench.studies.scales import RN152, RUNS, TWO_SOURCES
from peclr_dali.bench.studies.study import Claim, Studies, Study, main

RN50 = replace(
    RN152,
    folder=RUNS / "pose_rn50" / "paper",
    pretrain_files=(Path("configs/peclr_rn50.toml"),),
    finetune_files=(Path("configs/finetune_rn50.toml"),),
)
# Section 1: "improvements of up to 43% in 3D EPE in the lowest labeled setting".
_PERCENT = {("two_020", "one_020"): 20.0, ("two_010", "scratch_010"): 43.0}
SHARES = {"010": 0.1, "020": 0.2, "040": 0.4, "060": 0.6, "080": 0.8, "100": 1.0}


def label_fractions(study: Study, percent: Mapping[tuple[str, str], float] = _PERCENT) -> None:
    """Figure 7, section 4.4, with ResNet-152: scratch, PeCLR on one source, PeCLR on two, with shares of the labels.

    Pre-training also sees the images of the part that is held out, without labels: Table 2 shares its networks.
    """
    labels = {share: (f"data.label_fraction={fraction}",) for share, fraction in SHARES.items()}
    for seed in study.seeds or (0, 1):
        one, two = study.pretrain("one", seed), study.pretrain("two", seed, TWO_SOURCES)
        study.finetune_with(labels, seed, {"scratch": None, "one": one, "two": two})
    pairs = (("one", "scratch"), ("two", "scratch"), ("two", "one"))
    compared = [(f"{better}_{share}", f"{than}_{share}") for share in SHARES for better, than in pairs]
    study.compare(*[Claim(*pair, "epe_cm", percent.get(pair)) for pair in compared])
    study.compare(*[Claim(f"one_{n}", f"scratch_{n}", "pa_epe_cm") for n in ("010", "020", "040", "100")])
    # "for 20% of labeled data, M_FH+YT3D performs almost on par with M_b using 40% of labeled data"
    study.compare(Claim("scratch_040", "two_020", "epe_cm"))


def label_fractions_rn50(study: Study) -> None:
    """The same with ResNet-50: supplement, section 4."""
    label_fractions(study, {("two_020", "one_020"): 8.6})


STUDIES: Studies = {"paper": {label_fractions: RN152, label_fractions_rn50: RN50}}

if __name__ == "__main__":
    main(STUDIES)
