"""The same numbers each time on a GPU, too: its fastest kernels add in the order in which their threads come."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils import deterministic

_CUBLAS = "CUBLAS_WORKSPACE_CONFIG"


@contextmanager
def deterministic_algorithms() -> Iterator[None]:
    """Let PyTorch take deterministic kernels only, and raise an error where there is none.

    Attention's backward pass adds with atomics on CUDA by default; with this it does not. cuBLAS reads
    its setting when CUDA starts, so this comes before. Not run on a GPU yet.
    """
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    memory: Any = deterministic
    filled = memory.fill_uninitialized_memory
    os.environ.setdefault(_CUBLAS, ":4096:8")
    torch.use_deterministic_algorithms(True)
    # It would fill the buffers of each block again; what is uninitialised here is never read.
    memory.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        memory.fill_uninitialized_memory = filled
