"""Losses over log-probabilities, for what :meth:`fuyou.Engine.tokens` returns."""
