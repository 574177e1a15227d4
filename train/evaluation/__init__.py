"""Measures a fine-tuned network."""
