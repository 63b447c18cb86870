"""Checkpoints of a training on several nodes: commits of all ranks, weights in and out, exports."""
