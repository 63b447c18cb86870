"""The foundation of ``fuyou`` and ``fcdp``: memory, storage, hardware, models and data."""

from common.openmp import decide_waiting

PROJECT = "fuyou"
"""Marks this package, so that ``fuyou`` and ``fcdp`` notice another one that is also called ``common``."""

# Here, since every process (command, ranks, optimizer process) imports this package before PyTorch.
decide_waiting()
