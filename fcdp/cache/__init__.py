"""Cached parameters: which are cached, in which memory, and whether they are still up to date."""
