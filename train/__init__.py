"""Trains pose encoders."""
