"""Blocks of GGUF types decode to the numbers that the package gguf makes of them, bit for bit."""

from typing import Any

import numpy as np
import pytest
import torch
from torch._inductor import metrics

from common import quantization
from common.hardware import force_kernels
from common.models.checkpoint.compressed import tensors
from common.models.checkpoint.compressed.gguf_blocks import BLOCKS
from common.models.checkpoint.compressed.tensors import Component, CompressedTensor

gguf = pytest.importorskip("gguf")


def format_of(kind: str, rows: int, columns: int) -> CompressedTensor:
    stored = Component("codes", torch.uint8, (rows, BLOCKS[kind].row_nbytes(columns)))
    return CompressedTensor(kind, (rows, columns), (1, BLOCKS[kind].numbers), torch.float32, (stored,))


def random_matrix(kind: str, rows: int) -> tuple[CompressedTensor, np.ndarray, np.ndarray]:
    """Return a matrix of any bytes, its bytes, and its numbers by the package gguf."""
    tensor = format_of(kind, rows, 1024)
    data = np.random.default_rng(0).integers(0, 256, tensor.components[0].shape, dtype=np.uint8)
    typed = data.view({"F32": np.float32, "F16": np.float16}.get(kind, np.uint8))
    with np.errstate(all="ignore"):
        return tensor, data, gguf.dequantize(typed, gguf.GGMLQuantizationType[kind])


def assert_same_bits(found: torch.Tensor, expected: np.ndarray) -> None:
    numbers = ~np.isnan(expected)  # the bits of a NaN do not count
    assert np.array_equal(np.isnan(found.numpy()), ~numbers)
    assert np.array_equal(found.numpy()[numbers].view(np.uint32), expected[numbers].view(np.uint32))


@pytest.mark.parametrize("kind", BLOCKS)
def test_bits_are_those_of_the_package_gguf(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = gguf.GGMLQuantizationType
    assert gguf.GGML_QUANT_SIZES[kinds[kind]] == (BLOCKS[kind].numbers, BLOCKS[kind].nbytes)
    monkeypatch.setattr(tensors, "CHUNK_ELEMENTS", 3 * 1024)
    tensor, data, expected = random_matrix(kind, 8)
    assert tensor.problem() is None
    out = torch.empty(8, 1024)
    tensor.decode({"codes": torch.from_numpy(data)}, out)
    assert_same_bits(out, expected)
    half = torch.empty(1024, 8, dtype=torch.bfloat16)
    tensor.decode({"codes": torch.from_numpy(data)}, half.T)
    assert torch.equal(half.T.nan_to_num(), torch.from_numpy(expected).bfloat16().nan_to_num())


@pytest.mark.slow
def test_compiled_bits_are_the_same_for_all_types_of_one_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """What CUDA would run, compiled by Inductor for the processor instead: a kernel each, without other memory."""
    monkeypatch.setattr(quantization, "_failures", [])
    with force_kernels("cuda"):
        quantization.fuses.cache_clear()
        for kind in BLOCKS:
            tensor, data, expected = random_matrix(kind, 4)
            out = torch.empty(4, 1024)
            quantization.fuses(out.device)
            metrics.reset()
            tensor.decode({"codes": torch.from_numpy(data)}, out)
            assert metrics.generated_kernel_count == 1, kind
            assert_same_bits(out, expected)
    quantization.fuses.cache_clear()
    assert not quantization._failures


def test_a_late_failure_to_compile_decodes_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A small function compiles, and this one does not: memory to decode all at once is in no plan."""
    tensor, data, expected = random_matrix("Q4_K", 64)
    out = torch.empty(64, 1024)
    decode, rows = tensors._decode, []

    def compiled(function: Any, *_: object) -> Any:
        if function is quantization._try:
            return function
        raise RuntimeError("no registers left")

    def noted(*arguments: Any) -> None:
        rows.append(arguments[-1].shape[1])
        decode(*arguments)

    monkeypatch.setattr(tensors, "CHUNK_ELEMENTS", 1024)  # and 8 times as many on an accelerator
    monkeypatch.setattr(tensors, "_decode", noted)
    monkeypatch.setattr(quantization, "_compiled", compiled)
    monkeypatch.setattr(quantization, "_failures", [])
    quantization.fuses.cache_clear()
    with force_kernels("cuda"), pytest.warns(UserWarning, match="no registers left"):
        tensor.decode({"codes": torch.from_numpy(data)}, out)
    quantization.fuses.cache_clear()
    assert_same_bits(out, expected)
    assert rows == [8] * 8


def test_rows_that_are_no_whole_blocks_are_refused() -> None:
    stored = Component("codes", torch.uint8, (4, 34))
    tensor = CompressedTensor("Q8_0", (4, 33), (1, 32), torch.float32, (stored,))
    assert tensor.problem() == "33 columns are no whole blocks"
