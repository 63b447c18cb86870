"""Hardware: this machine's GPUs, drives and memory, presets of others, and the one switch behind every branch that
differs between a CPU and a GPU."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_forced: str | None = None


def kernels_of(device: "torch.device") -> str:
    """Return the device type whose branches compute on ``device``: its own, unless a test forces another's."""
    return _forced if _forced is not None and device.type == "cpu" else device.type


@contextmanager
def force_kernels(device_type: str) -> Iterator[None]:
    """Let a CPU compute in the branches of another device while the context is open: to test them without one."""
    global _forced
    before, _forced = _forced, device_type
    try:
        yield
    finally:
        _forced = before
