"""Tensors to tensors: encoders, heads, the inverse of a view, and the loss."""
