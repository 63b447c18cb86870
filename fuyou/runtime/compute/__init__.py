"""Compute a step visit by visit, forward and backward. Blocks in pieces wait between their visits."""
