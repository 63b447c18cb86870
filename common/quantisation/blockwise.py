"""Quantise tensors in blocks: int8, or two int4 to a byte, with one fp32 scale for every :data:`BLOCK` elements.

Rounding is symmetric and to nearest: a block's scale maps its largest magnitude to 127 (int8) or 7 (int4), so the error
is at most half a scale: |x - dequantised| <= max|block| / 254, or / 14. A scale for each block keeps an outlier's
damage inside its block (Dettmers et al., arXiv:2110.02861, section 2.1; used by ZeRO++ and ZeRO-topo).

A row of c elements becomes one row of bytes: the scales of its blocks, then their values. Rows are independent, so each
can be sent by itself. Bytes per element: 1 + 4/256 and 0.5 + 4/256, against 2 in bf16.

:mod:`.reference` defines the arithmetic. On CUDA, PyTorch compiles it at the first call (not run on a GPU).
"""

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch

from common.quantisation import reference
from common.quantisation.layout import Bits, quantised_nbytes

_failures: list[str] = []
"""Why PyTorch could not compile the reference; after that it runs eagerly."""


def quantise(rows: torch.Tensor, bits: Bits, out: torch.Tensor | None = None) -> torch.Tensor:
    """Quantise ``rows`` ``[..., c]``, floating point, each in blocks of its own.

    A block with a NaN or an infinity comes back as NaN throughout: training should see that, not a clipped value.
    A block whose largest magnitude has no reciprocal in fp32 (below 1e-36) comes back as zeros.

    Args:
        out: where the bytes go, ``uint8 [..., quantised_nbytes(c)]`` with contiguous rows; None: a new tensor.
    """
    rows = rows.detach()
    if out is None:
        out = rows.new_empty((*rows.shape[:-1], quantised_nbytes(rows.size(-1), bits)), dtype=torch.uint8)
    _run(reference.quantise, rows.device.type, rows, bits, out)
    return out


def dequantise(
    payload: torch.Tensor, count: int, bits: Bits, out: torch.Tensor | None = None, *, add: bool = False
) -> torch.Tensor:
    """Return the rows ``[..., count]`` of ``payload`` ``uint8 [..., quantised_nbytes(count)]``.

    Args:
        out: where they go, floating point; None: a new tensor in fp32.
        add: whether they are added to ``out``, which is fp32 then.
    """
    if out is None:
        out = payload.new_empty((*payload.shape[:-1], count), dtype=torch.float32)
    _run(reference.dequantise, payload.device.type, payload, bits, out, add)
    return out


def _run(function: Callable[..., None], device_type: str, *arguments: Any) -> None:
    """Run ``function``: on CUDA compiled, unless compiling has failed, which is reported once."""
    if device_type == "cuda" and not _failures:
        try:
            _compiled(function)(*arguments)
            return
        except Exception as error:  # whatever Dynamo, Inductor, Triton or a missing compiler raise
            _failures.append(f"{type(error).__name__}: {error}")
            warnings.warn(f"Quantization runs uncompiled: torch.compile failed ({_failures[0]}).", stacklevel=3)
    function(*arguments)


@functools.cache
def _compiled(function: Callable[..., None]) -> Callable[..., None]:
    # fullgraph: compiling fails as a whole, before anything has been written or added.
    return torch.compile(function, fullgraph=True, dynamic=True)
