"""One page about runs."""
