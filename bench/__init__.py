"""Measures the loader beside others, the training step, and the paper's experiments."""
