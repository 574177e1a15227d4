"""Writes trained networks for other programs."""
