"""Tar shards that other programs wrote: their headers become an index."""
