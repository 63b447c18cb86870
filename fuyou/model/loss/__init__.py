"""Losses: cross entropy in passes, router losses, and the tensor that starts the backward pass."""
