"""Checkpoints on disk: reading, converting, decompressing and writing weights."""
