"""Small programs around `pipelines.make_loader`; the first line of each says the command."""
