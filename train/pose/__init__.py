"""Poses: labels, losses, metrics and predictions."""
