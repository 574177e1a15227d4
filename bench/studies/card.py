"""What is pre-training at the paper's settings worth? ResNet-50, batches of 2048, LARS and 100 epochs on one card.

    python -m peclr_dali.bench.studies.card --arm peclr_010 --record bench/results/experiments.jsonl

14,400 rendered hands in place of FreiHAND's, and random weights at the start in place of ImageNet's; all else of
pre-training is as shipped, with the overlay for H100 and H200. Fine-tuning takes about 300 steps with few labels.
One arm is one piece of work, about ten minutes of a card.
"""

from collections.abc import Sequence
from pathlib import Path

from peclr_dali.bench.studies.command import Studies, main
from peclr_dali.bench.studies.scales import RUNS
from peclr_dali.bench.studies.study import Claim, Scale, Study

LABELS = {  # a hundredth, a tenth and all of the labels
    "001": ("data.label_fraction=0.01", "train.epochs=300"),
    "010": ("data.label_fraction=0.1", "train.epochs=25"),
    "100": ("data.label_fraction=1.0", "train.epochs=6"),
}
SIMCLR = ("equivariance.variant=none", "geometry.rotation_deg=[0.0, 0.0]", "geometry.translation_frac=0.0")
"""Section 4.3, as in configs/simclr_rn50.toml."""
_HANDS = ".data/studies/card"

CARD = Scale(
    RUNS / "card" / "paper",
    pretrain=(
        f"data.root={_HANDS}", "encoder.weights=random", "data.split=train", "probe.every_epochs=20", "run.keep=1",
    ),
    finetune=(
        f"data.root={_HANDS}", "encoder.weights=random", "geometry.side_px=128", "validation.every_epochs=0",
        "run.keep=1",
    ),
    held_out=(f"data.root={_HANDS}", "data.split=val"),  # 1,600 images of 400 poses no network has seen
    pretrain_files=(Path("configs/peclr_rn50.toml"), Path("configs/cards/h100.toml")),
    finetune_files=(Path("configs/finetune_rn50.toml"),),
    hands={"out": Path(_HANDS), "poses": 4000, "seed": 6, "scenes": 300, "varied": True},
)  # fmt: skip


def card(study: Study) -> None:
    """Fine-tuning with a hundredth and a tenth of the labels, from random weights and from pre-trainings of each kind.

    Written before the first run: with both shares PeCLR is better than random weights, and than SimCLR; and PeCLR with
    another version of the pose as positive is better than PeCLR. Each kind is pre-trained once, so that seeds give no
    interval over pre-trainings.
    """
    _by_labels(study, ("001", "010"), study.seeds or (0, 1, 2))


def card_all(study: Study) -> None:
    """The same with all labels, of which nothing is claimed."""
    _by_labels(study, ("100",), study.seeds or (0,))


def _by_labels(study: Study, shares: Sequence[str], seeds: Sequence[int]) -> None:
    starts = {
        "scratch": None,
        "peclr": study.pretrain("peclr", 0),
        "simclr": study.pretrain("simclr", 0, SIMCLR),
        "version": study.pretrain("version", 0, ("data.positive=version",)),
    }
    for seed in seeds:
        study.finetune_with({share: LABELS[share] for share in shares}, seed, starts)
    pairs = (("peclr", "scratch"), ("peclr", "simclr"), ("version", "peclr"))
    compared = [(f"{better}_{share}", f"{than}_{share}") for share in shares for better, than in pairs]
    study.compare(*[Claim(*pair, metric) for pair in compared for metric in ("epe_px", "pa_epe_cm")])


STUDIES: Studies = {"paper": {card: CARD, card_all: CARD}}

if __name__ == "__main__":
    main(STUDIES)
