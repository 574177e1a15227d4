"""Rendered hands for users without a dataset: `make_dataset` writes them in FreiHAND's layout."""

from peclr_dali.synthetic.dataset import is_rendered, make_dataset

__all__ = ["is_rendered", "make_dataset"]
