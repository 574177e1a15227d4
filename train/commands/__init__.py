"""The commands that read data, train, and use trained networks."""
