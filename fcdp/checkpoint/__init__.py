"""Sharded checkpoints of a training on several nodes."""
