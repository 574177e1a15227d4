"""Poses: labels, losses, metrics, validation and prediction."""
