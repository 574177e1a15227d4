"""Where should pre-training on photographs of one's own begin, and how long and at which rate should it go on?

Written before the first run. The photographs are those of `make photographs`; with seed K the people of fold K are held
out and measured. ResNet-18 is fine-tuned to the end with 50 landmarked hands of the others. Of the encoders that are
trained on with the photographs, at least one is better than `networks/peclr_rn18` as it is, and than random weights.
"""

from pathlib import Path

from peclr_dali.bench.studies.scales import RUNS
from peclr_dali.bench.studies.study import Keys, Scale, Studies, Study, main

SHIPPED = Path("networks/peclr_rn18.safetensors")
RATES = ("1e-4", "3e-4", "1e-3")
EPOCHS = {150: 25, 450: 75}
"""Steps of 256 images -> epochs."""
_PHOTOGRAPHS = ("data.source=folder", "data.root=.data/sign_digits/images", "data.split=all")
_ONE_CORE = ("train.threads=1", "pipelines.threads=1", "run.keep=1", "run.checkpoint_every=150")

PHOTOGRAPHS = Scale(
    RUNS / "own_photographs" / "small",
    pretrain=(*_PHOTOGRAPHS, *_ONE_CORE, f"encoder.weights={SHIPPED}", "probe.every_epochs=0"),
    finetune=(
        *_PHOTOGRAPHS, *_ONE_CORE, "data.label_fraction=0.0305", "validation.every_epochs=0",
        "data.box_margin=1.3", "geometry.translation_frac=0.06", "geometry.scale=[0.85, 1.15]", "geometry.side_px=64",
        "encoder.name=resnet18", "encoder.weights=random", "optim.lr=1e-3", "optim.warmup_epochs=50",
        "train.batch=32", "train.micro_batch=32", "train.epochs=1500",  # a step each
    ),
    held_out=(),
    pretrain_files=(Path("configs/photographs.toml"),),
)  # fmt: skip


def _box(seed: int, name: str) -> Keys:
    return (f"data.box=.data/sign_digits/fold_{seed}/{name}.csv",)


def own_photographs(study: Study) -> None:
    """Random weights, the shipped encoder, and the shipped encoder trained on."""
    for seed in study.seeds or (0, 1):
        starts: dict[str, Path | None] = {"scratch": None, "shipped": SHIPPED}
        for steps, epochs in EPOCHS.items():
            for rate in RATES:
                keys = (*_box(seed, "boxes"), f"optim.lr={rate}", f"train.epochs={epochs}", "optim.warmup_epochs=3")
                starts[f"{rate}_{steps}"] = study.pretrain(f"{rate}_{steps}", seed, keys)
        for name, start in starts.items():
            measured = (*_PHOTOGRAPHS, *_box(seed, "held_out"))
            keys = (*_box(seed, "boxes"), f"data.label_seed={seed}")
            study.finetune(name, seed, keys, start, on=measured)


STUDIES: Studies = {"small": {own_photographs: PHOTOGRAPHS}}

if __name__ == "__main__":
    main(STUDIES)
