"""Resharding: a run continues with another number of ranks or nodes."""
