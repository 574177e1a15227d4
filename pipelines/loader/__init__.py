"""The loader: from places in an epoch to batches."""
