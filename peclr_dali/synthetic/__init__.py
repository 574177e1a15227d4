"""Renders photographs of hands in FreiHAND's layout, for `make-data`."""
