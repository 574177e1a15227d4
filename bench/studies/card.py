"""What is pre-training at the paper's settings worth? ResNet-50, batches of 2048, LARS and 100 epochs on one card.

    python -m peclr_dali.bench.studies.card --scale paper --arm peclr_010 --record bench/results/experiments.jsonl

14,400 rendered hands in place of FreiHAND's, and random weights at the start in place of ImageNet's; all else of
pre-training is as shipped, with the overlay for H100 and H200. Fine-tuning takes about 300 steps with few labels.
One arm is one piece of work, about ten minutes of a card; what is finished is not repeated. Small is the same for a
CPU, in a minute: it shows that the study runs, and nothing else.
"""

from __future__ import annotations

from typing import Final

from peclr_dali.bench.studies.run import main
from peclr_dali.bench.studies.study import RUNS, SCALES, Arm, Claim, Dataset, Scale, ScaleName, Studies, Study
from peclr_dali.bench.studies.table_1 import BEST

LABELS: Final = {  # a hundredth, a tenth and all of the labels
    "001": ("data.label_fraction=0.01", "train.epochs=300"),
    "010": ("data.label_fraction=0.1", "train.epochs=25"),
    "100": ("data.label_fraction=1.0", "train.epochs=6"),
}
STARTS: Final = {
    "peclr": Arm(),
    "simclr": BEST["simclr_best"],  # section 4.3, as in configs/simclr_rn50.toml
    "version": Arm(["data.positive=version"]),
}

CARD: Final = Scale(
    Dataset(
        ".data/studies/card",
        held_out=("data.split=val",),  # 1,600 images of 400 poses that no network has seen
        render={"poses": 4000, "seed": 6, "scenes": 300, "varied": True},
    ),
    ("encoder.weights=random", "data.split=train", "probe.every_epochs=20", "run.keep=1"),
    ("encoder.weights=random", "geometry.side_px=128", "validation.every_epochs=0", "run.keep=1"),
    ("configs/peclr_rn50.toml", "configs/cards/h100.toml"),
    ("configs/finetune_rn50.toml",),
)
_TINY: Final = ("encoder.name=timm/test_resnet", "geometry.side_px=32", "train.threads=1", "pipelines.threads=1")
TOY: Final = Scale(
    Dataset(".data/studies/toy", held_out=CARD.data.held_out, render={"poses": 40, "seed": 6, "scenes": 20}),
    (*CARD.pretrain, *_TINY, "train.batch=64", "train.micro_batch=32", "train.epochs=2", "optim.warmup_epochs=1.0"),
    (*CARD.measured, *_TINY, "train.batch=16", "train.micro_batch=16"),
    CARD.pretrain_files[:1],
    CARD.measured_files,
)
_TOY_LABELS: Final = ("data.label_fraction=0.5", "train.epochs=1")


def card(scale: ScaleName, name: str, shares: tuple[str, ...], seeds: tuple[int, ...]) -> Study:
    """Fine-tuning with shares of the labels, from random weights and from one pre-training of each kind.

    Written before the first run: with a hundredth and with a tenth of the labels, PeCLR is better than random weights,
    and than SimCLR; and PeCLR with another version of the pose as positive is better than PeCLR. With all labels
    nothing is claimed. Each kind is pre-trained once, so that seeds give no interval over pre-trainings.
    """
    labels = {share: LABELS[share] if scale == "paper" else _TOY_LABELS for share in shares}
    pairs = [("peclr", "scratch"), ("peclr", "simclr"), ("version", "peclr")]
    return Study(
        name,
        at=CARD if scale == "paper" else TOY,
        folder=RUNS / "card" / scale,
        seeds=seeds,
        pretrain_seeds=1,
        pretrain=STARTS,
        measured=Arm.by_labels(STARTS, labels),
        compare=[
            Claim(f"{better}_{share}", f"{than}_{share}", metric)
            for share in shares
            for better, than in pairs
            for metric in ("epe_px", "pa_epe_cm")
        ],
    )


STUDIES: Final[Studies] = {
    scale: [card(scale, "card", ("001", "010"), (0, 1, 2)), card(scale, "card_all", ("100",), (0,))] for scale in SCALES
}

if __name__ == "__main__":
    main(STUDIES)
