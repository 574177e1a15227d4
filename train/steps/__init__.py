"""One optimiser step, and its optimiser."""
