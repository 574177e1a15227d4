"""A run's folder and what is written there."""
