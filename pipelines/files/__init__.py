"""Reads and checks the bytes of image files before DALI's decoder gets them."""
