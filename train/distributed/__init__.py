"""Ranks: what they exchange, and how they stop."""
