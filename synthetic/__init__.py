"""Rendered hands for users without a dataset: `make_dataset` writes them in FreiHAND's layout."""

from synthetic.dataset import is_unfinished, make_dataset

__all__ = ["is_unfinished", "make_dataset"]
