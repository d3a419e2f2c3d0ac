"""Trackers of other packages: one file each, imported only when its name is asked for."""
