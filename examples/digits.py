"""Run `.venv/bin/python -m examples.digits`: tells digits apart in photographs of hands, from frozen features.

It is the usual test of self-supervised encoders (Chen et al., "A Simple Framework for Contrastive Learning of Visual
Representations", 2020, appendix B.8): scikit-learn's logistic regression on features of the encoder, which is not
trained any more. The classifier sees the photographs of a few people, and is tested on people whom neither it nor
pre-training has seen. Beside it are raw pixels and an untrained encoder. `make photographs` prepares what it needs.
"""

import csv
from pathlib import Path
from typing import Any

import click
import numpy as np
import numpy.typing as npt
import torch
from pydantic import TypeAdapter
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from threadpoolctl import threadpool_limits

from peclr_dali.models.encoders import Encoder, make_encoder
from peclr_dali.pipelines.config import DataConfig
from peclr_dali.pipelines.sources import load_index
from peclr_dali.train.config.finetuning import FinetuneConfig
from peclr_dali.train.config.pretraining import Config
from peclr_dali.train.probe import features_of_rows, trained_encoder
from peclr_dali.train.runs.checkpoint import find_checkpoint, load_checkpoint

PEOPLE = (2, 5, 10, 20, 40)
DRAWS = 10  # of the few people; the accuracy is their mean
Table = dict[str, npt.NDArray[Any]]


def read_network(source: Path) -> tuple[Config | FinetuneConfig, Encoder]:
    """The configuration and the encoder of a run (its folder or a checkpoint)."""
    path = find_checkpoint(source, "the folder of a run, or a checkpoint")
    saved = load_checkpoint(path)
    config = TypeAdapter[Any](FinetuneConfig if "pose" in saved["config"] else Config).validate_python(saved["config"])
    return config, trained_encoder(saved, str(path), config)


def accuracy(features: npt.NDArray[np.float32], table: Table, people: npt.NDArray[Any]) -> float:
    """Share of the held-out photographs (N, D) whose digit is told right, with labels of `people` alone."""
    fitted, tested = np.isin(table["person"], people), table["part"] == "test"
    classifier = make_pipeline(StandardScaler(), LogisticRegression(C=0.1, max_iter=2000))
    with threadpool_limits(1):  # the matrices are small: threads would wait for each other
        classifier.fit(features[fitted], table["label"][fitted])
        return float(classifier.score(features[tested], table["label"][tested]))


def by_people(features: npt.NDArray[np.float32], table: Table) -> dict[int, float]:
    """The accuracy for each number of people with labels, at last for all who are not held out."""
    everybody = np.unique(table["person"][table["part"] == "train"])
    found = {}
    for count in (count for count in PEOPLE if count < len(everybody)):
        rng = np.random.default_rng(count)  # the same people for every encoder
        found[count] = float(
            np.mean([accuracy(features, table, rng.choice(everybody, count, replace=False)) for _ in range(DRAWS)])
        )
    return {**found, len(everybody): accuracy(features, table, everybody)}


@click.command()
@click.argument("sources", metavar="RUN...", nargs=-1, required=True, type=Path)
@click.option("--root", type=Path, default=Path(".data/sign_digits"), help="Folder with images and boxes.csv.")
@click.option("--fold", default=0, help="Whose people are held out.")
def main(sources: tuple[Path, ...], root: Path, fold: int) -> None:
    """Compute features of each RUN, fit classifiers, print the accuracy. RUN is a run's folder, or a checkpoint."""
    index = load_index(DataConfig("folder", f"{root}/images", box=f"{root}/boxes.csv"))
    with Path(root, f"fold_{fold}", "labels.csv").open(newline="") as file:
        lines = {line["file"]: line for line in csv.DictReader(file)}
    table = {name: np.array([lines[image][name] for image in index.paths]) for name in ("label", "person", "part")}
    networks: dict[str, tuple[Any, Encoder | None]] = {str(path): read_network(path) for path in sources}
    first, _ = networks[str(sources[0])]
    torch.manual_seed(0)
    networks["untrained encoder"] = first, make_encoder(first.encoder.name, first.geometry.side_px).eval()
    networks["raw pixels"] = first, None
    for name, (config, encoder) in networks.items():
        places, features, _ = features_of_rows(encoder, index, np.arange(len(index)), config, lambda *_: None)
        assert len(places) == len(index), f"{len(index) - len(places)} photographs cannot be read"
        shares = by_people(features, table).items()
        print(f"{name}: {', '.join(f'{share:.1%} ({count} people)' for count, share in shares)}")


if __name__ == "__main__":
    main()
