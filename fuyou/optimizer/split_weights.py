"""Split fp32 master weights: a bf16 part, ``high``, that the model computes with, and 16 more bits, ``low``.

``high`` is the master weight rounded to bf16, half away from zero: ``(bits + 0x8000) >> 16``. Nearest-even could not be
undone with 16 bits (an even ``high`` would have 65,537 preimages). ``low`` is the signed difference
``bits - (high << 16)``.
Storing both takes 4 bytes instead of the 6 of an fp32 master weight beside its bf16 copy.
"""

import torch


def split(master: torch.Tensor, high: torch.Tensor, low: torch.Tensor) -> None:
    """Split ``master`` into two parts, from which :func:`join` rebuilds the same bits.

    Finite values that round beyond the largest bf16 get an infinite ``high`` (as ``master.bfloat16()`` would) and are
    still rebuilt exactly. A NaN stays a NaN in ``high`` and after :func:`join`; its payload is not kept.

    Args:
        master: fp32 ``[n]``, not changed.
        high: bf16 ``[n]``, written.
        low: int16 ``[n]``, written.
    """
    master = master.clone()
    # A NaN with a small payload would round to infinity, one with a large payload to -0.
    master[master.isnan()] = float("nan")
    split_in_place(master, high, low)


def split_in_place(master: torch.Tensor, high: torch.Tensor, low: torch.Tensor) -> None:
    """Do what :func:`split` does in half the time. ``master`` is overwritten; NaNs in it must come from arithmetic.

    NaNs that arithmetic makes, or passes on from bf16, are quiet and have nothing in their lower 16 bits, so they need
    no rounding and stay what they are. Only NaNs from elsewhere (a weight file) can have other payloads.
    """
    bits = master.view(torch.int32)
    # A cast to int16 keeps the low 16 bits. Those of the difference are those of ``bits``: ``high << 16`` has none.
    low.copy_(bits)
    bits.add_(0x8000).bitwise_right_shift_(16)
    high.view(torch.int16).copy_(bits)


def join(high: torch.Tensor, low: torch.Tensor, master: torch.Tensor, scratch: torch.Tensor | None = None) -> None:
    """Rebuild fp32 master weights: ``bits = (high << 16) + low``.

    Args:
        high: bf16 ``[n]``.
        low: int16 ``[n]``.
        master: fp32 ``[n]``, written.
        scratch: int32 ``[n]`` to work in; made if not given.
    """
    if scratch is None:
        scratch = torch.empty(master.numel(), dtype=torch.int32)
    master.copy_(high)  # widening appends 16 zero bits
    # Not ``add_(low)``: operands of different widths take a slow path.
    scratch.copy_(low)
    master.view(torch.int32).add_(scratch)
