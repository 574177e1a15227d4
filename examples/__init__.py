"""Small programs around `make_loader`; the first line of each says the command."""
