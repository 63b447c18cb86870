"""Training by several ranks, in memory or out of core.

It says how ranks meet, what each runs, and how they end together."""
