"""Resharding: a run that was made by some ranks goes on with more or fewer of them."""
