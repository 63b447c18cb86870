"""Blocks as PyTorch compiles them: one forward and one backward pass for each kind of block, which all blocks of that
kind share (*regional compilation*).

A compiler joins what eager mode runs one operator after the other: norms, activations, rotary embeddings, residuals. It
leaves matrix products and attention to the same libraries. Numbers differ from eager mode's by rounding; random numbers
are the same. A recomputation leaves out what only the block's output needs, as eager mode's does; but nothing that the
forward pass has computed is saved for it, and all of a block's gradients are there at once.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from common.activity import activity
from common.errors import FinetuneError, UserError

BACKEND = "inductor"  # PyTorch's compiler, by its name
KINDS = 64  # How many kinds of calls (block, shapes, gradients) are compiled; others run as they are


class CompiledBlocks:
    """Compiles blocks when they are first called.

    Args:
        device: that computes.

    Raises:
        UserError: PyTorch cannot compile for it here.
    """

    def __init__(self, device: torch.device):
        self._forward, self._recompute = (
            torch.compile(function, backend=BACKEND, options=_options()) for function in (_forward, _recompute)
        )
        self._called = 0
        torch._dynamo.config.recompile_limit = max(KINDS, torch._dynamo.config.recompile_limit)
        _try_compiler(device)

    def of(self, block: nn.Module) -> Callable[..., Any]:
        """Return what is to be called instead of ``block``."""

        def run(*args: Any, **kwargs: Any) -> Any:
            if self._called > 1:  # forward, and with gradients
                return self._run(block, args, kwargs)
            self._called += 1
            with activity("compiling a block, once for all blocks of its kind: this may take minutes", announced=True):
                return self._run(block, args, kwargs)

        return run

    def _run(self, block: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        try:
            return (self._recompute if torch.is_grad_enabled() else self._forward)(block, args, kwargs)
        except torch._dynamo.exc.TorchDynamoException as error:
            reason = str(error).strip().partition("\n")[0]
            raise FinetuneError(
                f"PyTorch cannot compile a {type(block).__name__} ({type(error).__name__}: {reason}). Leave --compile "
                "out."
            ) from error


class _Unread(torch.autograd.Function):
    """Hidden states ``[B, S, H]`` whose gradient is passed on, and whose values are not read: nothing computes them."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor) -> torch.Tensor:
        return torch.empty(hidden.shape, dtype=hidden.dtype, device=hidden.device)  # not like it: that would read it

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


def _forward(block: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    return block(*args, **kwargs)


def _recompute(block: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    output = block(*args, **kwargs)
    if isinstance(output, torch.Tensor):
        return _Unread.apply(output)
    return (_Unread.apply(output[0]), *output[1:])


def _options() -> dict[str, Any] | None:
    # Dropout draws what eager mode draws, and a recomputation what its forward pass drew.
    return {"fallback_random": True} if BACKEND == "inductor" else None


def _try_compiler(device: torch.device) -> None:
    with activity("trying PyTorch's compiler", announced=True):
        try:
            torch.compile(_something, backend=BACKEND)(torch.ones(8, device=device))
        except Exception as error:  # from the compiler's tools: a C++ compiler, Triton, a linker
            reason = str(error).strip().partition("\n")[0]
            raise UserError(
                f"--compile needs a compiler that PyTorch can use: g++ for processors, Triton for GPUs. "
                f"Trying it failed with {type(error).__name__}: {reason}. Install it, or leave --compile out."
            ) from error


def _something(values: torch.Tensor) -> torch.Tensor:
    return values.sin() + 1
