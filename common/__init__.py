"""Provide what ``fuyou`` and ``fcdp`` share: memory, storage, hardware, models, and data. Nothing here imports either
of them."""

import os

# Marks this package, so that `fuyou` and `fcdp` notice another one that is also called `common`
PROJECT = "fuyou"

# PyTorch's OpenMP threads spin 6 ms by default; next to the optimizer process that starves it. OpenMP's libraries read
# this when PyTorch is loaded. Costs up to 6% where the CPU is the device and otherwise idle.
if not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"} & os.environ.keys():
    os.environ |= {"GOMP_SPINCOUNT": "2000", "KMP_BLOCKTIME": "0"}
