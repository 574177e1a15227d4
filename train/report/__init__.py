"""One page about runs, evaluations and predictions."""
