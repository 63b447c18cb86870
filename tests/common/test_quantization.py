"""Block quantization: error bounds, sizes, and the same values as a plain twin."""

import warnings

import pytest
import torch

from common import quantization
from common.hardware import force_kernels
from common.quantization import BLOCK, Bits, dequantize, quantize, quantized_nbytes


def twin(values: list[float], largest: int) -> list[float]:
    """One block, element by element, in double precision."""
    scale = max(map(abs, values)) / largest
    return [round(value / scale) * scale if scale else 0.0 for value in values]


@pytest.mark.parametrize(("bits", "largest"), [(8, 127), (4, 7)])
@pytest.mark.parametrize("count", [1, 199, BLOCK, BLOCK + 1, 3 * BLOCK + 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_element_is_within_half_a_step_of_the_same_block(
    bits: Bits, largest: int, count: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(count)
    # Blocks of very different size: each has to have its own scale.
    tensor = (torch.randn(count) * 10.0 ** (torch.arange(count) // BLOCK * 3 - 3)).to(dtype)
    packed = quantize(tensor, bits)
    back = dequantize(packed, count, bits)
    assert back.shape == (count,)
    assert packed.dtype == torch.uint8 and packed.shape == (quantized_nbytes(count, bits),)
    for start in range(0, count, BLOCK):
        block, found = tensor[start : start + BLOCK].float(), back[start : start + BLOCK]
        bound = block.abs().max() / largest / 2
        assert (block - found).abs().max() <= bound * 1.0001
        expected = torch.tensor(twin(block.tolist(), largest))
        # Where a value lies on the border of two steps, fp32 and double may round differently: one step, rarely.
        differ = (found - expected).abs() > bound * 0.01
        assert differ.float().mean() <= 0.01


@pytest.mark.parametrize("bits", [8, 4])
def test_zeros_denormals_and_nonfinite_values(bits: Bits) -> None:
    def there_and_back(tensor: torch.Tensor) -> torch.Tensor:
        return dequantize(quantize(tensor, bits), tensor.numel(), bits)

    assert not there_and_back(torch.zeros(3)).any()
    assert not there_and_back(torch.full((BLOCK,), 1e-45)).any(), "no infinite steps"
    assert there_and_back(torch.tensor([1e-35, 0.0])).tolist() == pytest.approx([1e-35, 0.0])
    for bad in (torch.inf, -torch.inf, torch.nan):
        spoilt = torch.ones(2 * BLOCK)
        spoilt[3] = bad
        back = there_and_back(spoilt)
        assert back[:BLOCK].isnan().all()
        assert torch.equal(back[BLOCK:], torch.ones(BLOCK)), "other blocks know nothing of it"


@pytest.mark.parametrize("bits", [8, 4])
def test_strided_places_between_which_nothing_is_touched(bits: Bits) -> None:
    torch.manual_seed(0)
    rows = torch.randn(4, 5, 3 * BLOCK).bfloat16()[:, 1:4, 17:600]
    nbytes = quantized_nbytes(rows.size(-1), bits)
    places = torch.full((4, 6, nbytes + 8), 77, dtype=torch.uint8)
    quantize(rows, bits, places[:, 2:5, 4:-4])
    assert torch.equal(places[:, 2:5, 4:-4], quantize(rows.contiguous(), bits))
    assert (places[:, :2] == 77).all() and (places[..., -4:] == 77).all()
    whole = torch.full((4, 5, 3 * BLOCK), 9.0)
    dequantize(places[:, 2:5, 4:-4], rows.size(-1), bits, whole[:, 1:4, 17:600])
    assert torch.equal(whole[:, 1:4, 17:600], dequantize(quantize(rows, bits), rows.size(-1), bits))
    assert (whole[:, 0] == 9).all() and (whole[..., :17] == 9).all() and (whole[..., 600:] == 9).all()


def test_where_compiling_fails_one_warning_names_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def compiler(*_: object, **__: object) -> None:
        raise RuntimeError("no Triton here")

    monkeypatch.setattr(torch, "compile", compiler)
    monkeypatch.setattr(quantization, "_failures", [])
    quantization._compiled.cache_clear()
    rows = torch.randn(2, 300)
    expected = quantize(rows, 8)
    with force_kernels("cuda"):
        with pytest.warns(UserWarning, match="no Triton here"):
            assert torch.equal(quantize(rows, 8), expected)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert torch.equal(quantize(rows, 8), expected)
    quantization._compiled.cache_clear()


def test_running_out_of_memory_is_no_failure_to_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    def function(_: torch.Tensor) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    monkeypatch.setattr(quantization, "_failures", [])
    with force_kernels("cuda"), pytest.raises(torch.OutOfMemoryError):
        quantization.run_fused(function, torch.device("cpu"), torch.zeros(3))
    assert not quantization._failures


def test_more_shapes_than_pytorch_compiles_one_function_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its limit is 8; each of these has another number of dimensions, or one of size 1."""
    compiler = torch.compile
    monkeypatch.setattr(
        torch, "compile", lambda function, **_: compiler(function, backend="eager", fullgraph=True)
    )
    monkeypatch.setattr(quantization, "_failures", [])
    quantization._compiled.cache_clear()
    with force_kernels("cuda"):
        for ranks in range(1, 7):
            for last in (1, 3):
                values = torch.zeros((2,) * ranks + (last,))
                quantization.run_fused(quantization._try, values.device, values)
                assert (values == 2).all()
    quantization._compiled.cache_clear()
    assert not quantization._failures


@pytest.mark.slow
@pytest.mark.parametrize("bits", [8, 4])
def test_compiled_for_the_cpu_it_gives_the_same_bits(bits: Bits, monkeypatch: pytest.MonkeyPatch) -> None:
    """What CUDA would run, compiled by Inductor for the processor instead."""
    monkeypatch.setattr(quantization, "_failures", [])
    torch.manual_seed(0)
    for dtype, shape in ((torch.float32, (3, 700)), (torch.bfloat16, (2, 3, 2 * BLOCK))):
        rows = torch.randn(shape).to(dtype)
        expected = quantize(rows, bits)
        total = torch.randn(shape)
        sums = dequantize(expected, shape[-1], bits, total.clone(), add=True)
        with force_kernels("cuda"):
            assert torch.equal(quantize(rows, bits), expected)
            assert torch.equal(dequantize(expected, shape[-1], bits, total, add=True), sums)
    assert not quantization._failures
