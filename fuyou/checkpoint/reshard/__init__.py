"""Resharding: a run continues with more or fewer ranks."""
