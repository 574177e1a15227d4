"""Plans views: random numbers, matrices, and the regions to decode."""
