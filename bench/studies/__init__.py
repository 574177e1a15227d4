"""The experiments of the paper, a file for each of its figures and tables."""
