"""What to do about a device that has run out of memory, instead of PyTorch's error."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from common.errors import FinetuneError


class DeviceMemoryError(FinetuneError):
    """Raised when the device has no memory left."""


@contextmanager
def explain_out_of_memory() -> Iterator[None]:
    """Raise an error that says what to lower where PyTorch finds no memory on the device. Not run on a GPU yet.

    Raises:
        DeviceMemoryError: the device has no memory left.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        told = str(error).split(". ", 1)[0]
        raise DeviceMemoryError(
            f"The device has no memory left, though what was planned fits its budget ({told}). Lower --device-memory "
            "by a GiB or two, or give a smaller --micro-batch; nvidia-smi shows what else takes memory. The last "
            "committed step is intact: --resume continues from it."
        ) from error
