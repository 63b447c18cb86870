"""Checkpoints of bitsandbytes become, bit for bit, the numbers that it makes of them on a CPU."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from common import quantization
from common.errors import FinetuneError, UserError
from common.hardware import force_kernels
from common.models.checkpoint.compressed import formats, tensors
from common.models.checkpoint.compressed.parameters import CompressedParameter
from tests.common.models.checkpoint.compressed.writing import shards

#: Written by bitsandbytes 0.50.2: ``case.suffix`` as in its checkpoints, and ``case numbers``, which it has made.
GOLDENS = load_file(Path(__file__).parent / "bitsandbytes.safetensors")
CASES = [name.removesuffix(" numbers") for name in GOLDENS if name.endswith(" numbers")]
SETTINGS = {"quant_method": "bitsandbytes", "load_in_4bit": True}


def packed(case: str, module: str = "layer") -> dict[str, torch.Tensor]:
    return {
        name.replace(case, module, 1): value for name, value in GOLDENS.items() if name.startswith(f"{case}.")
    }


@pytest.mark.parametrize("case", CASES)
def test_equals_bitsandbytes(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensors, "CHUNK_ELEMENTS", 7 * 256)
    monkeypatch.setattr(formats, "SPAN_BYTES", 1000)
    files, numbers = shards(tmp_path, packed(case), SETTINGS), GOLDENS[f"{case} numbers"]
    assert list(files.tensors) == ["layer.weight"]
    found = files.read("layer.weight")
    assert found.dtype == numbers.dtype and torch.equal(found, numbers)
    assert torch.equal(files.read_rows("layer.weight", 3, 7), numbers[3:7])
    parameter = CompressedParameter(files.compressed["layer.weight"].tensor, (numbers.shape[1], 1), (0,))
    payload, flat = (
        torch.zeros(parameter.nbytes, dtype=torch.uint8),
        torch.empty(numbers.numel(), dtype=numbers.dtype),
    )
    parameter.encode([files.components("layer.weight")], payload)  # as in a store
    parameter.decode(payload, flat)
    assert torch.equal(flat.view(numbers.shape), numbers)


@pytest.mark.parametrize("case", ["nf4-nested-fp32", "int8"])
@pytest.mark.slow
def test_compiled_bits_are_the_same(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of several matrices at once: experts."""
    files, numbers = shards(tmp_path, packed(case), SETTINGS), GOLDENS[f"{case} numbers"]
    monkeypatch.setattr(quantization, "_failures", [])
    quantization.fuses.cache_clear()
    with force_kernels("cuda"):
        assert torch.equal(files.read("layer.weight"), numbers)
    tensor, size = files.compressed["layer.weight"].tensor, numbers.numel()
    two = CompressedParameter(tensor, (numbers.shape[1], 1), (0, size))
    payload, flat = torch.zeros(two.nbytes, dtype=torch.uint8), torch.empty(2 * size, dtype=numbers.dtype)
    two.encode([files.components("layer.weight") for _ in range(2)], payload)
    with force_kernels("cuda"):
        two.decode(payload, flat)
    quantization.fuses.cache_clear()
    assert torch.equal(flat.view(2, *numbers.shape), torch.stack([numbers, numbers]))
    assert not quantization._failures


@pytest.mark.parametrize(("changes", "error", "words"), [
    ({".weight_format": torch.tensor(1, dtype=torch.uint8)}, UserError, "columns in another order"),
    ({".SCB": torch.ones(3)}, FinetuneError, r"scale of shape \[3\]"),
])  # fmt: skip
def test_int8_that_cannot_be_read(
    changes: dict[str, torch.Tensor], error: type[Exception], words: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=words):
        shards(tmp_path, packed("int8") | {f"layer{key}": value for key, value in changes.items()}, SETTINGS)


@pytest.mark.parametrize(("state", "error", "words"), [
    (b'{"shape": [9, 120], "blocksize": 64, "dtype": "float32"}', UserError, "no whole parts of its rows"),
    (b'{"shape": [9, 128], "blocksize": 64, "nested_blocksize": 64}', UserError, "in blocks of 64"),
    (b'{"shape": [9, 128]}', FinetuneError, "Download it again"),
    (b"{", FinetuneError, "Download it again"),
])  # fmt: skip
def test_four_bits_that_cannot_be_read(
    state: bytes, error: type[Exception], words: str, tmp_path: Path
) -> None:
    name = "layer.weight.quant_state.bitsandbytes__nf4"
    content = packed("nf4-fp32") | {name: torch.tensor(list(state), dtype=torch.uint8)}
    with pytest.raises(error, match=words):
        shards(tmp_path, content, SETTINGS)
