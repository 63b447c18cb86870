"""Bounds on the model that a configuration may describe, so that a wrong one costs neither memory nor hours."""

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from common.errors import UserError
from common.units import format_bytes

# Fields of configurations that count something which is built, or listed, one by one; the largest value of each.
_COUNTS = (
    (re.compile(r"layer|depth|block|stage", re.I), 10_000),
    (re.compile(r"expert|num_labels", re.I), 100_000),
)
_NO_COUNTS = re.compile(r"size|dim|theta|width|channel|eps", re.I)

_MOST_PARAMETERS = 200_000  # Parameters (tensors) of a model of any origin
_BYTES_PER_ENTRY = 50  # Least bytes of a tensor in a header: name, dtype, shape, and place
# What a model may have of its checkpoint's files. A tensor on disk may hold 32 experts; a byte 8 numbers of 1 bit,
# which count twice until embeddings are tied. A tiny checkpoint may lack a new head.
_PARAMETERS_PER_TENSOR = 32
_FREE_PARAMETERS = 200
_NUMBERS_PER_BYTE = 16
_FREE_NUMBERS = 1 << 26
_MOST_BUFFER_BYTES = 1 << 30  # Bytes of all buffers, which are in memory: tables of positions and masks


def check_counts(fields: Any, name: str) -> None:
    """Reject a configuration that says more layers, experts, or labels than any model has, before it is interpreted.

    Args:
        fields: the content of its file.
        name: of the file, for the message.

    Raises:
        UserError: names the field and its value.
    """
    if isinstance(fields, list):
        for value in fields:
            check_counts(value, name)
    if not isinstance(fields, dict):
        return
    for field, value in fields.items():
        numbers = [
            number for number in (value if isinstance(value, list) else [value]) if isinstance(number, int)
        ]
        for pattern, most in _COUNTS:
            if numbers and max(numbers) > most and pattern.search(field) and not _NO_COUNTS.search(field):
                raise UserError(
                    f"{name} says {field} = {max(numbers):,}, and no model with more than {most:,} can be built. "
                    "Is it the file that belongs to the weights?"
                )
        check_counts(value, name)


@contextlib.contextmanager
def bounded_construction(checkpoint: Path | None) -> Iterator[None]:
    """End the construction of a model with more parameters than any model has, or than its files could hold.

    Args:
        checkpoint: directory of its weights; None: it has none.

    Raises:
        UserError: gives both numbers.
    """
    most, most_numbers = _MOST_PARAMETERS, None
    tensors = size = 0
    if checkpoint is not None:
        tensors, size = _stored(checkpoint)
        if size:  # otherwise those who read the weights say what is there instead
            most = min(most, tensors * _PARAMETERS_PER_TENSOR + _FREE_PARAMETERS)
            most_numbers = size * _NUMBERS_PER_BYTE + _FREE_NUMBERS
    count = numbers = 0

    def hook(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        nonlocal count, numbers
        count += 1
        numbers += 0 if parameter is None else parameter.numel()
        if count <= most and (most_numbers is None or numbers <= most_numbers):
            return
        if most_numbers is None:
            raise UserError(f"This configuration describes a model of more than {most:,} parameter tensors.")
        raise UserError(
            f"{checkpoint}: config.json describes a model of at least {count:,} tensors with {numbers:,} numbers, "
            f"and the safetensors files have {size:,} bytes, with room for the names of {tensors:,} tensors. They do "
            "not belong together."
        )

    handle = register_module_parameter_registration_hook(hook)
    try:
        yield
    finally:
        handle.remove()


def _stored(checkpoint: Path) -> tuple[int, int]:
    """Return how many tensors the headers of a directory's safetensors files can describe at most, and all bytes."""
    tensors = size = 0
    for path in checkpoint.glob("*.safetensors"):
        with contextlib.suppress(OSError), path.open("rb") as file:
            header = int.from_bytes(file.read(8), "little")
            size += path.stat().st_size
            tensors += min(header, path.stat().st_size) // _BYTES_PER_ENTRY
    return tensors, size


def check_buffers(model: nn.Module) -> None:
    """Reject a model whose buffers would not fit into memory: tables of absurdly many positions."""
    sizes = {name: buffer.nbytes for name, buffer in model.named_buffers()}
    if sum(sizes.values()) > _MOST_BUFFER_BYTES:
        largest = max(sizes, key=lambda name: sizes[name])
        raise UserError(
            f"This configuration makes buffers of {format_bytes(sum(sizes.values()))}, of which {largest} takes "
            f"{format_bytes(sizes[largest])}, and they have to be in memory: the limit is "
            f"{format_bytes(_MOST_BUFFER_BYTES)}. Lower max_position_embeddings in config.json."
        )
