"""Compiled and Triton passes give the bits of PyTorch's kernels, whatever the shape, the strides and the numbers."""

import importlib.util
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from common.quantisation import BLOCK, Bits, blockwise, dequantise, quantise, quantised_nbytes, reference
from common.quantisation.blockwise import FusedKernels, gives_the_same_bits
from common.quantisation.cpu_kernels import compiled_kernels

CPU = torch.device("cpu")
ROOT = Path(__file__).parents[3]
has_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")


@pytest.fixture(params=["compiled", pytest.param("triton", marks=has_triton)])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[FusedKernels]:
    """The kernels of the CPU, and those of CUDA in Triton's interpreter."""
    if request.param == "compiled":
        found = compiled_kernels()
        assert found is not None, "there is a compiler"
        yield found
        return
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    name = "common.quantisation.triton_kernels"
    monkeypatch.delitem(sys.modules, name, raising=False)
    yield importlib.import_module(name).TritonKernels()
    sys.modules.pop(name, None)


def _rows(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    random = torch.Generator().manual_seed(len(shape) + shape[-1])
    rows = torch.randn(shape, generator=random) * 10.0 ** torch.randint(-6, 3, (*shape[:-1], 1), generator=random)
    flat = rows.view(-1)
    for place, value in enumerate([0.0, -0.0, torch.nan, torch.inf, -torch.inf, 1e-37, 1e-42, 3e38]):
        flat[place * flat.numel() // 8] = value
    return rows.to(dtype)


def _check(kernels: FusedKernels, rows: torch.Tensor, payload: torch.Tensor, bits: Bits) -> None:
    """Compare all that ``kernels`` do with ``rows`` and bytes in the places of ``payload``."""
    expected = payload.clone()
    reference.quantise(rows, bits, expected)
    assert kernels.takes(rows, payload)
    kernels.quantise(rows, bits, payload)
    assert torch.equal(payload, expected)
    for start, add in ((torch.zeros_like(rows), False), (rows.float(), True)):
        # The same strides as those of the rows.
        found = torch.empty_strided(rows.shape, rows.stride(), dtype=start.dtype).copy_(start)
        twin = start.clone()
        reference.dequantise(expected, bits, twin, add)
        kernels.dequantise(payload, bits, found, add)
        torch.testing.assert_close(found, twin, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1,), (BLOCK,), (2 * BLOCK + 1,), (3, 9 * BLOCK + 130), (2, 3, 700)])
def test_the_same_bits(kernels: FusedKernels, shape: tuple[int, ...], dtype: torch.dtype, bits: Bits) -> None:
    rows = _rows(shape, dtype)
    _check(kernels, rows, torch.zeros((*shape[:-1], quantised_nbytes(shape[-1], bits)), dtype=torch.uint8), bits)


@pytest.mark.parametrize("bits", [8, 4])
def test_halfway_between_two_steps_the_even_one_is_taken(kernels: FusedKernels, bits: Bits) -> None:
    largest = 127 if bits == 8 else 7
    rows = torch.cat((torch.tensor([float(largest)]), torch.arange(-largest + 0.5, largest)))[None]
    _check(kernels, rows, torch.zeros((1, quantised_nbytes(rows.size(1), bits)), dtype=torch.uint8), bits)
    found = dequantise(quantise(rows, bits), rows.size(1), bits)
    assert (found % 2 == 0)[:, 1:].all()


@pytest.mark.parametrize("bits", [8, 4])
def test_strided_places_between_which_nothing_is_touched(kernels: FusedKernels, bits: Bits) -> None:
    rows = _rows((4, 5, 3 * BLOCK), torch.bfloat16)[:, 1:4, 17:600]
    nbytes = quantised_nbytes(rows.size(-1), bits)
    places = torch.full((4, 6, nbytes + 8), 77, dtype=torch.uint8)
    _check(kernels, rows, places[:, 2:5, 4:-4], bits)
    assert (places[:, :2] == 77).all() and (places[..., -4:] == 77).all()
    whole = torch.full((4, 5, 3 * BLOCK), 9.0)
    kernels.dequantise(places[:, 2:5, 4:-4], bits, whole[:, 1:4, 17:600], False)
    assert (whole[:, 0] == 9).all() and (whole[..., :17] == 9).all() and (whole[..., 600:] == 9).all()


def test_many_threads_give_the_same_bits() -> None:
    rows, threads = _rows((5, 700 * BLOCK + 3), torch.bfloat16), torch.get_num_threads()
    kernels = compiled_kernels()
    assert kernels is not None
    try:
        torch.set_num_threads(3)
        _check(kernels, rows, torch.zeros((5, quantised_nbytes(rows.size(1), 4)), dtype=torch.uint8), 4)
    finally:
        torch.set_num_threads(threads)


class _Wrong:
    """Kernels of another library, with one thing wrong."""

    def __init__(self, kernels: Any, **wrong: Callable[..., Any]):
        self._kernels, self._wrong = kernels, wrong

    def __getattr__(self, name: str) -> Any:
        return self._wrong.get(name) or getattr(self._kernels, name)


def test_kernels_with_other_bits_are_not_believed() -> None:
    right: Any = compiled_kernels()
    assert gives_the_same_bits(right, CPU)

    def flips(rows: torch.Tensor, bits: Bits, out: torch.Tensor) -> None:
        right.quantise(rows, bits, out)
        out[-1, -1] ^= 1

    def rounds(payload: torch.Tensor, bits: Bits, out: torch.Tensor, add: bool) -> None:
        right.dequantise(payload, bits, out, add)
        if add:
            out *= 1 + 2**-23

    assert not gives_the_same_bits(_Wrong(right, quantise=flips), CPU)
    assert not gives_the_same_bits(_Wrong(right, dequantise=rounds), CPU)


def test_without_a_compiler_pytorch_does_it(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = _rows((2, 1000), torch.float32)
    fused = quantise(rows, 4)
    assert blockwise.fused_kernels(CPU) is not None
    monkeypatch.setattr(blockwise, "fused_kernels", lambda device: None)
    assert torch.equal(quantise(rows, 4), fused)


def test_dtypes_that_no_kernel_takes_are_quantised_all_the_same() -> None:
    rows = torch.randn(3, 300).half()
    assert torch.equal(quantise(rows, 8), quantise(rows.float(), 8))
    back = dequantise(quantise(rows, 8), 300, 8, torch.empty_like(rows))
    assert back.dtype == torch.float16 and torch.equal(back, dequantise(quantise(rows, 8), 300, 8).half())


@has_triton
def test_triton_compiles_for_gpus_that_are_not_here() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.helpers.triton_to_ptx"], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    compiled = done.stdout.split("--- ")[1:]
    assert len(compiled) == 12
    for text in compiled:
        assert ".entry" in text and "fma.rn.f32" not in text, "a product must be rounded before it is added to"
