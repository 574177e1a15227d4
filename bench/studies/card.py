"""What is pre-training at the paper's settings worth? ResNet-50, batches of 2048, LARS and 100 epochs on one card.

14,400 rendered hands replace FreiHAND's, and random weights ImageNet's; all else of pre-training is as shipped, with
the overlay for H100 and H200. Fine-tuning takes about 300 steps with few labels. One arm takes ten minutes of a card.
"""

from pathlib import Path

from peclr_dali.bench.studies.scales import RUNS, SIMCLR_BEST
from peclr_dali.bench.studies.study import Claim, Scale, Studies, Study, main

FEW = {  # a hundredth and a tenth of the labels
    "001": ("data.label_fraction=0.01", "train.epochs=300"),
    "010": ("data.label_fraction=0.1", "train.epochs=25"),
}
ALL = {**FEW, "100": ("data.label_fraction=1.0", "train.epochs=6")}
_HANDS = ".data/studies/card"
_BOTH = (f"data.root={_HANDS}", "encoder.weights=random", "run.keep=1")

CARD = Scale(
    RUNS / "card" / "paper",
    pretrain=(*_BOTH, "data.split=train", "probe.every_epochs=20"),
    finetune=(*_BOTH, "geometry.side_px=128", "validation.every_epochs=0"),
    held_out=(f"data.root={_HANDS}", "data.split=val"),  # 1,600 images of 400 poses no network has seen
    pretrain_files=(Path("configs/peclr_rn50.toml"), Path("configs/cards/h100.toml")),
    finetune_files=(Path("configs/finetune_rn50.toml"),),
    hands=({"out": Path(_HANDS), "poses": 4000, "seed": 6, "scenes": 300, "varied": True},),
)


def card(study: Study) -> None:
    """Few labels, and random weights beside one pre-training of each kind: no interval over pre-trainings.

    Written before the first run: with both shares PeCLR is better than random weights, and than SimCLR; and PeCLR with
    another version of the pose as positive is better than PeCLR. With all labels nothing is claimed.
    """
    starts = {
        "scratch": None,
        "peclr": study.pretrain("peclr", 0),
        "simclr": study.pretrain("simclr", 0, SIMCLR_BEST),
        "version": study.pretrain("version", 0, ("data.positive=version",)),
    }
    for seed in study.seeds or (0, 1, 2):
        study.finetune_with(ALL if seed == 0 else FEW, seed, starts)
    pairs = (("peclr", "scratch"), ("peclr", "simclr"), ("version", "peclr"))
    compared = [(f"{better}_{share}", f"{than}_{share}") for share in FEW for better, than in pairs]
    study.compare(*[Claim(*pair, metric) for pair in compared for metric in ("epe_px", "pa_epe_cm")])


STUDIES: Studies = {"paper": {card: CARD}}

if __name__ == "__main__":
    main(STUDIES)
