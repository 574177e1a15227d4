"""Rendered hands for users without a dataset: `make_dataset` writes them in FreiHAND's layout."""

from peclr_dali.synthetic.dataset import make_dataset

__all__ = ["make_dataset"]
