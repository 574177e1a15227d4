"""Does the worth of pre-training last to the end of fine-tuning? The paper fine-tunes to the end.

Written before the first run. Fine-tuned to the end with 3, 10 and 100 % of the labels, PeCLR is better than random
weights, and than SimCLR with its best augmentations, in 2D EPE and in PA-EPE. The gain shrinks from 400 steps to 6,400,
and most with all labels, but does not vanish.

The arms of 25,600 and 102,400 steps, one seed each, were added when the error was seen to fall until 6,400.
"""

from dataclasses import replace
from pathlib import Path

from peclr_dali.bench.studies.scales import RUNS, SIMCLR_BEST, SMALL
from peclr_dali.bench.studies.study import Claim, Keys, Studies, Study, main

EPOCHS = {"030": (0.03, 33), "100": (0.1, 10), "all": (1.0, 1)}
"""Share of the labels -> the fraction, and the epochs that take about 400 steps of 32 images."""
LENGTHS = {400: 1, 1600: 4, 6400: 16, 25600: 64, 102400: 256}
"""Steps of fine-tuning, each with a cosine to zero of its own -> the factor of the epochs."""
_OTHER_HANDS = ".data/studies/other_hands"
RATE = replace(
    SMALL,
    held_out=(f"data.root={_OTHER_HANDS}", "data.split=all"),  # by these, rates are chosen and nothing is judged
    hands=(*SMALL.hands, {"out": Path(_OTHER_HANDS), "poses": 360, "seed": 4, "scenes": 300}),
)
RN18 = replace(
    SMALL,
    folder=RUNS / "rn18" / "small",
    finetune=(*SMALL.finetune, "encoder.name=resnet18", "geometry.side_px=64", "optim.lr=1e-3"),
)


def _starts(study: Study, seed: int) -> dict[str, Path | None]:
    """Random weights, and two pre-trainings of sixty epochs."""
    sixty = "train.epochs=60"
    return {
        "scratch": None,
        "simclr": study.pretrain("simclr_60", seed, (*SIMCLR_BEST, sixty)),
        "peclr": study.pretrain("peclr_60", seed, (sixty,)),
    }


def _labels(share: str, steps: int) -> Keys:
    fraction, epochs = EPOCHS[share]
    return f"data.label_fraction={fraction}", f"train.epochs={epochs * LENGTHS[steps]}"


def rates(study: Study) -> None:
    """Fine-tuning's rate for each start: with 10 % of the labels and 1,600 steps, on hands that are not measured.

    The largest, 6e-3, was best for each of the three; `SMALL` has it.
    """
    for start, pretrained in _starts(study, 0).items():
        for rate in ("15e-4", "3e-3", "6e-3"):
            study.finetune(f"{start}_{rate}", 100, (*_labels("100", 1600), f"optim.lr={rate}"), pretrained)


def to_the_end(study: Study) -> None:
    """Three pre-trainings of each kind, and two fine-tunings from each; the short ones first, the longest once."""
    for steps in LENGTHS:
        for seed in study.seeds or range(6 if steps < 25600 else 1):
            for share in EPOCHS:
                for start, pretrained in _starts(study, seed % 3).items():
                    study.finetune(f"{start}_{share}_{steps}", seed, _labels(share, steps), pretrained)
    _compare(study, ("scratch", "simclr"), [f"{share}_{steps}" for share in EPOCHS for steps in LENGTHS])


def to_the_end_rn18(study: Study) -> None:
    """A second encoder, larger than the pictures need: `networks/peclr_rn18`, and random weights."""
    starts = {"scratch": None, "peclr": Path("networks/peclr_rn18.safetensors")}
    for share in ("100", "all"):
        for steps, factor in {400: 1, 4000: 10}.items():
            fraction, epochs = EPOCHS[share]
            keys = (f"data.label_fraction={fraction}", f"train.epochs={epochs * factor}")
            study.finetune_with({f"{share}_{steps}": keys}, 0, starts)
    _compare(study, ("scratch",), [f"{share}_{steps}" for share in ("100", "all") for steps in (400, 4000)])


def _compare(study: Study, than: tuple[str, ...], arms: list[str]) -> None:
    claims = [(f"peclr_{arm}", f"{start}_{arm}") for arm in arms for start in than]
    study.compare(*[Claim(*pair, metric) for pair in claims for metric in ("epe_px", "pa_epe_cm")])


STUDIES: Studies = {"small": {to_the_end: SMALL, to_the_end_rn18: RN18, rates: RATE}}

if __name__ == "__main__":
    main(STUDIES)
