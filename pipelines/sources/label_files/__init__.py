"""Reads the kinds of files that datasets have their labels in."""
