"""Blocks in pieces: how they are cut, and how a block computes while only one of its pieces is on the device."""
