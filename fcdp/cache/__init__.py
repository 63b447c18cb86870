"""Cached parameters: which are cached, in which memory, and whether they are still up to date.
A rank reads them in place of a gather; an optimizer step or a load makes them outdated."""
