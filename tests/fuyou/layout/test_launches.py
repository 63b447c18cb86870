"""Kernels that decoding a block of 300 million weights launches on a GPU, counted without each."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import pytest
import torch
from torch._inductor import metrics
from torch.utils._python_dispatch import TorchDispatchMode

from common import quantization
from common.hardware import force_kernels
from common.models.checkpoint.compressed import tensors
from common.models.checkpoint.compressed.gguf_blocks import BLOCKS
from common.models.checkpoint.compressed.parameters import CompressedParameter
from common.models.checkpoint.compressed.tensors import Component, CompressedTensor
from fuyou.layout.frozen_weights import FrozenDtype
from fuyou.model.operators import makes_views
from tests.helpers.fake_cuda import CUDA, fake_cuda

HIDDEN, INNER, EXPERTS = 6144, 16384, 16
MATRICES = 3 * HIDDEN * INNER
FP8, UINT8, FP32 = torch.float8_e4m3fn, torch.uint8, torch.float32


class Launches(TorchDispatchMode):
    """Counts calls of operators that compute; memory that is only allocated takes no kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "aten" and not makes_views(func) and "empty" not in func.__name__:
            self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@contextmanager
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[Launches]:
    """Count what runs on a fake GPU, where a compiled function is one kernel (tested below)."""
    mode = Launches()

    def compiled(function: Any, *specialized: Any) -> Any:
        return lambda *arguments: mode.names.append(function.__name__)

    monkeypatch.setattr(quantization, "_compiled", compiled)
    monkeypatch.setattr(quantization, "_failures", [])
    quantization.fuses.cache_clear()
    with fake_cuda():
        quantization.fuses(CUDA)
        mode.names.clear()
        with mode:
            yield mode
    quantization.fuses.cache_clear()


@pytest.mark.parametrize(("stored", "most"), [(FrozenDtype.NF4, 6), (FrozenDtype.INT8, 4)])
def test_a_block_in_fewer_bits(stored: FrozenDtype, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rest = 2 * HIDDEN
    with counted(monkeypatch) as launches:
        flat = torch.empty(MATRICES + rest, dtype=torch.bfloat16, device=CUDA)
        payload = torch.empty(stored.used_nbytes(MATRICES, rest, flat.dtype), dtype=UINT8, device=CUDA)
        stored.decode(payload, MATRICES, flat)
    assert 1 < len(launches.names) <= most, launches.names


def compressed(name: str) -> tuple[list[CompressedParameter], float]:
    """Return the matrices of a block in a format, and how many kernels may decode them."""
    if name == "fp8":
        shape, block, codes = (INNER, HIDDEN), (128, 128), "e4m3"
        components = (Component("codes", FP8, shape), Component("scale", FP32, (INNER // 128, HIDDEN // 128)))
        tensor = CompressedTensor(codes, shape, block, torch.bfloat16, components)
        return [CompressedParameter(tensor, (HIDDEN, 1), (0,))] * 3, 40
    if name == "fp8 experts":
        shape = (INNER // EXPERTS, HIDDEN)
        components = (
            Component("codes", FP8, shape),
            Component("scale", FP32, (shape[0] // 128, HIDDEN // 128)),
        )
        tensor = CompressedTensor("e4m3", shape, (128, 128), torch.bfloat16, components)
        offsets = tuple(number * shape[0] * HIDDEN for number in range(EXPERTS))
        return [CompressedParameter(tensor, (HIDDEN, 1), offsets)] * 3, 40
    if name.startswith("gguf"):
        count = EXPERTS if name == "gguf experts" else 1
        rows = INNER // count
        offsets = tuple(number * rows * HIDDEN for number in range(count))
        parameters = []
        for kind in ("Q4_K", "Q6_K", "Q8_0"):
            codes = Component("codes", UINT8, (rows, BLOCKS[kind].row_nbytes(HIDDEN) or 0))
            block = (1, BLOCKS[kind].numbers)
            tensor = CompressedTensor(kind, (rows, HIDDEN), block, torch.float32, (codes,))
            parameters.append(CompressedParameter(tensor, (HIDDEN, 1), offsets))
        return parameters, 3  # one each, however many experts
    shape = (EXPERTS, INNER // EXPERTS, HIDDEN)
    scales = Component("scale", UINT8, (*shape[:2], HIDDEN // 32))
    components = (Component("codes", UINT8, (*shape[:2], HIDDEN // 2)), scales)
    tensor = CompressedTensor("e2m1", shape, (1, 32), torch.bfloat16, components)
    return [CompressedParameter(tensor, (shape[1] * HIDDEN, HIDDEN, 1), (0,))] * 3, 40


@pytest.mark.parametrize("name", ["fp8", "fp8 experts", "mxfp4", "gguf", "gguf experts"])
def test_a_compressed_block(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    parameters, most = compressed(name)
    assert sum(each.numel for each in parameters) == MATRICES
    # Each table is copied once in a run, for which the host may wait.
    copied = cache(lambda codes, device: tensors.TABLES[codes].to(device, non_blocking=True))
    monkeypatch.setattr(tensors, "_numbers", copied)
    with counted(monkeypatch) as launches:
        for each in parameters:
            flat = torch.empty(each.numel, dtype=torch.bfloat16, device=CUDA)
            each.decode(torch.empty(each.nbytes, dtype=UINT8, device=CUDA), flat)
    assert 2 < len(launches.names) <= most, launches.names


@pytest.mark.slow
@pytest.mark.parametrize("name", ["nf4", "int8", "fp8 experts", "mxfp4"])
def test_what_is_compiled_is_one_kernel_with_the_same_bits(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compiled by Inductor for the processor instead."""
    monkeypatch.setattr("tests.fuyou.layout.test_launches.HIDDEN", 256)
    monkeypatch.setattr("tests.fuyou.layout.test_launches.INNER", 2048)
    monkeypatch.setattr(quantization, "_failures", [])
    generator = torch.Generator().manual_seed(0)

    def decode(flat: torch.Tensor) -> None:
        if name in ("nf4", "int8"):
            stored = FrozenDtype(name)
            payload = torch.empty(stored.used_nbytes(flat.numel(), 0, flat.dtype), dtype=UINT8)
            stored.encode(
                torch.randn(flat.numel(), generator=generator).to(flat.dtype), flat.numel(), payload
            )
            metrics.reset()
            stored.decode(payload, flat.numel(), flat)
        else:
            each = compressed(name)[0][0]
            payload = torch.randint(0, 120, (each.nbytes,), dtype=UINT8, generator=generator)
            each.decode(payload, flat)

    count = 2048 * 256
    expected, decoded = torch.zeros(count, dtype=torch.bfloat16), torch.zeros(count, dtype=torch.bfloat16)
    decode(expected)
    generator.manual_seed(0)
    quantization.fuses.cache_clear()
    with force_kernels("cuda"):
        assert quantization.fuses(decoded.device)
        metrics.reset()
        decode(decoded)
    quantization.fuses.cache_clear()
    assert not quantization._failures and torch.equal(decoded, expected) and decoded.any()
    assert metrics.generated_kernel_count == 1
