"""The timeout of a process group, which groups made from it do not inherit."""

from datetime import timedelta

import torch
import torch.distributed as dist


def timeout_of(group: dist.ProcessGroup, device: torch.device) -> timedelta | None:
    """Return the timeout of collectives on a device; None if its backend has none."""
    try:
        timeout: timedelta = group._get_backend(device).options._timeout
    except (RuntimeError, AttributeError):
        return None
    return timeout
