"""Makes batches of augmented views with their matrices from images on disk; see `make_loader` and docs/library.md."""
