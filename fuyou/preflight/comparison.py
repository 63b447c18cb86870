"""Losses and gradients of two ways to train one model, compared within what rounding may do."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Gradients:
    """A loss, and gradients by every name of each parameter; None where there is none."""

    loss: float
    by_name: Mapping[str, torch.Tensor | None]


@dataclass(frozen=True)
class Tolerance:
    """How far two ways to compute the same may be apart."""

    # Of a tensor's gradient, relative to its largest element (or a hundredth of the whole gradient's). What is lost or
    # wrong is larger by orders of magnitude.
    gradient: float
    loss: float  # Relative


ORDER_OF_SUMS = Tolerance(1e-4, 2e-6)  # The same operators, gradients summed in another order in fp32
DOCUMENTS_APART = Tolerance(2e-3, 2e-5)  # Documents of packed rows, and each of them computed alone
NARROW = Tolerance(0.05, 2e-6)  # bf16, where a sum over a tied parameter's two places is rounded once more


def first_difference(expected: Gradients, found: Gradients, tolerance: Tolerance) -> str | None:
    """Return what is not equal, in words; None if nothing is apart by more than ``tolerance``."""
    if not abs(found.loss - expected.loss) <= tolerance.loss * max(1.0, abs(expected.loss)):
        return f"the loss is {found.loss:.6f}, and {expected.loss:.6f} in memory"
    there = [one for one in expected.by_name.values() if one is not None]
    least = 0.01 * max((float(one.abs().max()) for one in there), default=0.0)
    wrong = []
    for name, gradient in found.by_name.items():
        how = _deviation(expected.by_name[name], gradient, least, tolerance.gradient)
        if how is not None:
            wrong.append(f"the gradient of {name} is {how}")
    if not wrong:
        return None
    return f"{wrong[0]} (the first of {len(wrong)} of {len(found.by_name)} tensors)"


def _deviation(expected: torch.Tensor | None, found: torch.Tensor | None, least: float, tolerance: float) -> str | None:
    if expected is None and found is None:
        return None
    if found is None:
        return "there in memory only" if float(expected.abs().max()) > 0 else None  # type: ignore[union-attr]
    if expected is None:
        return "not there in memory" if float(found.abs().max()) > 0 else None
    scale = max(float(expected.abs().max()), least)
    difference = float((found.float() - expected.float()).abs().max()) / scale
    return None if difference <= tolerance else f"off by {difference:.1%} of its largest element"
