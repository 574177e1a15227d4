"""Measures fine-tuned networks on labelled images."""
