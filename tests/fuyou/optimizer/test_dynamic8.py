"""Moments in 8 bits equal the paper's, written out; compiled updates give PyTorch's bits."""

import itertools
import shutil

import numpy as np
import pytest
import torch

from common.errors import UserError
from fuyou.layout.record import Precision
from fuyou.layout.record_parts import BLOCK_ELEMENTS, OPTIMIZERS
from fuyou.optimizer.adam import Update, UpdateRange
from fuyou.optimizer.chunk_update import ChunkOptimizer, tried_kernels
from fuyou.optimizer.moments import MOMENT_CODES, SIGNED, UNSIGNED, DynamicCode, OptimizerStates
from tests.helpers.adam import CONFIG, randn
from tests.helpers.twin import in_8_bits

COUNT = 64 * BLOCK_ELEMENTS
NEEDS_COMPILER = pytest.mark.skipif(shutil.which("c++") is None, reason="needs a C++ compiler")


def kept(code: DynamicCode, values: torch.Tensor) -> torch.Tensor:
    codes, scales = torch.empty(values.numel(), dtype=torch.uint8), torch.empty(values.numel() // BLOCK_ELEMENTS)
    code.encode(values, codes, scales)
    result = torch.empty_like(values)
    code.decode(codes, scales, result)
    return result


@pytest.mark.parametrize(("code", "signed"), [(SIGNED, True), (UNSIGNED, False)])
def test_codes_are_the_papers(code: DynamicCode, signed: bool) -> None:
    """All magnitudes, each step of a code, and what lies on both sides of each of its thresholds."""
    values = randn(COUNT, 1) * 10.0 ** (9 * torch.rand(COUNT, generator=torch.Generator().manual_seed(2)) - 9)
    above, below = (np.nextafter(code.thresholds[:-1], np.float32(limit)) for limit in (2, -2))
    edges = torch.from_numpy(np.concatenate([np.sort(code.values), code.thresholds[:-1], above, below]))
    values[: edges.numel()] = edges
    values[::BLOCK_ELEMENTS] = 1.0
    values[-BLOCK_ELEMENTS:] = 0.0
    values = values if signed else values.abs()
    result = kept(code, values)
    assert torch.equal(result, in_8_bits(values, signed))
    assert not result[-BLOCK_ELEMENTS:].any()
    assert signed or bool((result[values > 0] > 0).all())
    large = values.abs() > 0.1
    assert float(((result - values) / values)[large].abs().max()) < 0.08


def test_each_code_is_exact_and_zeros_are_zero() -> None:
    for code in MOMENT_CODES:
        assert len(np.unique(code.values)) == 256 and code.values[0] == 0
        assert len(code.thresholds) == 256 and bool((np.diff(code.thresholds) > 0).all())
        values = torch.from_numpy(code.values.copy()).view(2, -1).clone()
        values[:, 0] = 1.0  # the scale of each block
        assert torch.equal(kept(code, values.view(-1)), values.view(-1))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_states_are_whole_pages(dtype: torch.dtype) -> None:
    low = 2 if dtype == torch.bfloat16 else 0
    expected = {"adamw": low + 8, "adamw8bit": low + 2.0625, "lion": low + 4}
    for name, nbytes in expected.items():
        precision = Precision(dtype, torch.float32, name)
        assert precision.state_bytes == nbytes
        # Ranks that become more or fewer write each component of a chunk alone.
        assert not any(component.nbytes(precision.page_elements) % 4096 for component in precision.components)


def test_optimizers_that_there_are_not() -> None:
    with pytest.raises(UserError, match=r"optimizer is adamw or adamw8bit or lion, not 'lyon'. Did you mean 'lion'"):
        Precision.named("bf16", "fp32", "lyon")
    with pytest.raises(UserError, match="keeps its moments in 8 bits: leave optimizer_dtype bf16 out"):
        Precision.named("bf16", "bf16", "adamw8bit")
    assert Precision.named("bf16", "bf16", "lion").state_bytes == 4


def states_of(optimizer: str, dtype: torch.dtype) -> OptimizerStates:
    kind, low = OPTIMIZERS[optimizer], None
    if dtype == torch.bfloat16:
        low = torch.randint(-(1 << 15), 1 << 15, (COUNT,), generator=torch.Generator().manual_seed(3)).to(torch.int16)
    moments = tuple(torch.zeros(COUNT, dtype=torch.uint8 if kind.blockwise else torch.float32) for _ in kind.moments)
    scales = tuple(torch.zeros(COUNT // BLOCK_ELEMENTS) for _ in kind.moments if kind.blockwise)
    return OptimizerStates(randn(COUNT, 4).to(dtype), low, moments, scales)


@NEEDS_COMPILER
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_compiled_updates_give_the_same_bits(optimizer: str, dtype: torch.dtype) -> None:
    """Several steps, ranges that are left out, decay, clipping; and what is left out stays as it is."""
    kernels = tried_kernels(optimizer)
    plain, compiled = (states_of(optimizer, dtype) for _ in range(2))
    runs = [UpdateRange(0, 5 * 128, 0), UpdateRange(7 * 128, COUNT - 128, 1)]
    for step, decay in itertools.product((2, 3, 50), (True, False)):
        gradient = randn(COUNT, 10 + step).to(dtype)
        update = Update(step, CONFIG, gradient_scale=1.0 if decay else 0.3)
        for states, own in ((plain, None), (compiled, kernels)):
            ChunkOptimizer(optimizer, own).update(states, gradient, update, decay=decay, runs=runs)
    for one, other in zip((*plain[:2], *plain[2], *plain[3]), (*compiled[:2], *compiled[2], *compiled[3]), strict=True):
        assert (one is None and other is None) or torch.equal(one, other)
    first = states_of(optimizer, dtype)
    assert torch.equal(first.parameter[5 * 128 : 7 * 128], compiled.parameter[5 * 128 : 7 * 128])
    assert not torch.equal(first.parameter, compiled.parameter)


@NEEDS_COMPILER
def test_every_update_is_compiled_here() -> None:
    """The processors that tests run on have what PyTorch's own kernels use."""
    for optimizer in OPTIMIZERS:
        kernels = tried_kernels(optimizer)
        assert kernels is not None
        states = states_of(optimizer, torch.bfloat16)
        assert kernels.can_update(optimizer, states, torch.zeros(COUNT, dtype=torch.bfloat16))
        assert not kernels.can_update(optimizer, states, torch.zeros(COUNT))
