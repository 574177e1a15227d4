"""Peers: other loaders that make the same two views from the same files and boxes, a file for each.

Each makes two square views of every image: rotation in [-45, 45] degrees, translation of up to 15/128 of their side,
scale in [0.6, 2], and jitter of hue, saturation and value. All shuffle. All are endless, so that no restart
between epochs is measured.
"""
