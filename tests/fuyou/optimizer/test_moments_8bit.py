"""Moments in 8 bits and masters in 24 equal the paper's, written out; compiled updates give PyTorch's bits."""

import itertools
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
import torch

from common.errors import UserError
from common.store import Store
from fuyou.checkpoint.commits import TrainingState, check_state
from fuyou.layout.record import Precision
from fuyou.layout.record_parts import ADAMW, ADAMW_8BIT, BLOCK_ELEMENTS
from fuyou.optimizer.adam import Update, UpdateRange
from fuyou.optimizer.chunk_update import ChunkOptimizer, tried_kernels
from fuyou.optimizer.moments import MOMENT_CODES, MomentCode, OptimizerStates, join, split
from tests.helpers.adam import CONFIG, randn
from tests.helpers.twin import in_8_bits, in_24_bits, round_half_away

COUNT = 64 * BLOCK_ELEMENTS
NEEDS_COMPILER = pytest.mark.skipif(shutil.which("c++") is None, reason="needs a C++ compiler")


def kept(code: MomentCode, values: torch.Tensor) -> torch.Tensor:
    codes, scales = (
        torch.empty(values.numel(), dtype=torch.uint8),
        torch.empty(values.numel() // BLOCK_ELEMENTS),
    )
    code.encode(values, codes, scales)
    result = torch.empty_like(values)
    code.decode(codes, scales, result)
    return result


@pytest.mark.parametrize("code", MOMENT_CODES)
def test_codes_are_the_papers(code: MomentCode) -> None:
    """All magnitudes, and the middles between the values of a code."""
    values = randn(COUNT, 1) * 10.0 ** (9 * torch.rand(COUNT, generator=torch.Generator().manual_seed(2)) - 9)
    ascending = np.sort(code.values)
    edges = torch.from_numpy(np.concatenate([ascending, (ascending[1:] + ascending[:-1]) / 2]))
    values[: edges.numel()] = edges
    values[::BLOCK_ELEMENTS] = 1.0
    values[-BLOCK_ELEMENTS:] = 0.0
    values = values if code.signed else values.abs()
    result = kept(code, values)
    assert torch.equal(result, in_8_bits(values, code.signed))
    assert not result[-BLOCK_ELEMENTS:].any()
    assert code.signed or bool((result[values > 0] > 0).all())
    large = values.abs() > 0.1
    assert float(((result - values) / values)[large].abs().max()) < 0.05


def test_master_weights_of_24_bits() -> None:
    bits = torch.randint(-(2**31), 2**31, (COUNT,), generator=torch.Generator().manual_seed(5)).to(
        torch.int32
    )
    # Ties, with and without a carry
    bits[:4] = torch.tensor([0x3F808080, 0x3F807F80, 0x3F80FF80, 0x3FFFFF80])
    masters = bits.view(torch.float32)
    masters = masters[masters.isfinite() & (masters.abs() > 1e-37) & (masters.abs() < 1e38)]
    high, low = torch.empty_like(masters, dtype=torch.bfloat16), torch.empty_like(masters, dtype=torch.int8)
    split(masters, high, low)
    joined = torch.empty_like(masters)
    join(high, low, joined)
    assert torch.equal(joined, in_24_bits(masters)) and torch.equal(high, round_half_away(joined))
    again = torch.empty_like(low)
    split(joined, high, again)
    assert torch.equal(again, low)


def test_optimizers_that_there_are_not() -> None:
    with pytest.raises(
        UserError, match=r"optimizer must be adamw or adamw8bit, not 'adam'. Did you mean 'adamw'"
    ):
        Precision.named("bf16", "adam")


def test_a_store_of_an_earlier_versions_moments_is_rejected_by_name(tmp_path: Path) -> None:
    def state(dtype: str, optimizer: str = "adamw8bit") -> TrainingState:
        return TrainingState(0, 0, "id", "model", "torch.bfloat16", dtype, optimizer=optimizer)

    store = cast(Store, SimpleNamespace(id="id", directories=[tmp_path]))
    assert check_state(store, state("torch.uint8").to_dict(), state("torch.uint8")) == state("torch.uint8")
    with pytest.raises(
        UserError, match=r"keeps moments of adamw8bit in torch\.float32, as an earlier version did"
    ):
        check_state(store, state("torch.float32").to_dict(), state("torch.uint8"))
    with pytest.raises(UserError, match="keeps moments of lion"):
        check_state(store, state("torch.float32", "lion").to_dict(), state("torch.float32", "adamw"))


def states_of(optimizer: str, dtype: torch.dtype) -> OptimizerStates:
    blockwise, low = optimizer == ADAMW_8BIT, None
    if dtype == torch.bfloat16:
        low = torch.randint(-(1 << 15), 1 << 15, (COUNT,), generator=torch.Generator().manual_seed(3))
        low = low.to(torch.int8 if blockwise else torch.int16)
    moments = tuple(torch.zeros(COUNT, dtype=torch.uint8 if blockwise else torch.float32) for _ in range(2))
    scales = tuple(torch.zeros(COUNT // BLOCK_ELEMENTS) for _ in range(2 * blockwise))
    return OptimizerStates(randn(COUNT, 4).to(dtype), low, moments, scales)


@NEEDS_COMPILER
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("optimizer", [ADAMW, ADAMW_8BIT])
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
    for one, other in zip(
        (*plain[:2], *plain[2], *plain[3]), (*compiled[:2], *compiled[2], *compiled[3]), strict=True
    ):
        assert (one is None and other is None) or torch.equal(one, other)
    first = states_of(optimizer, dtype)
    assert torch.equal(first.parameter[5 * 128 : 7 * 128], compiled.parameter[5 * 128 : 7 * 128])
    assert not torch.equal(first.parameter, compiled.parameter)


@NEEDS_COMPILER
def test_every_update_is_compiled_here() -> None:
    """The processors that tests run on have what PyTorch's own kernels use."""
    for optimizer in (ADAMW, ADAMW_8BIT):
        assert tried_kernels(optimizer) is not None
