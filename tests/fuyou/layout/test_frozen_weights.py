"""Frozen weights in fewer bits: what they become, and that the engine computes with just that."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import get_peft_model
from transformers import AutoModelForCausalLM

from common import quantization
from common.errors import UserError
from common.hardware import force_kernels
from common.memory.buffers import PAGE
from common.models.adapters.options import AdapterOptions
from fuyou.layout import frozen_weights
from fuyou.layout.frozen_weights import ROW_ELEMENTS, FrozenDtype
from tests.helpers.adapters import InMemory, compare, train
from tests.helpers.engines import batches, directories
from tests.helpers.engines import engine as plain_engine
from tests.helpers.twin import tiny_configs

#: Bytes per element, and the root mean square error of normal numbers relative to theirs, measured.
COSTS = {
    FrozenDtype.INT8: (260 / 256, 0.0075),
    FrozenDtype.NF4: (36 / 64, 0.095),
    FrozenDtype.PLAIN: (2, 0.0),
}


@pytest.mark.parametrize("kept", COSTS)
def test_there_and_back(kept: FrozenDtype) -> None:
    """More than one row, zeros that stay zeros, and what is no matrix unchanged."""
    matrices, rest = ROW_ELEMENTS + 3 * 2048, 2048
    flat = torch.randn(matrices + rest, generator=torch.Generator().manual_seed(0)).bfloat16()
    flat[100:400] = 0
    per_element, error = COSTS[kept]
    payload = torch.empty(kept.used_nbytes(matrices, rest, flat.dtype), dtype=torch.uint8)
    assert 0 <= payload.numel() - (matrices * per_element + 2 * rest) < PAGE
    kept.encode(flat, matrices, payload)
    back = torch.full_like(flat, torch.nan)
    kept.decode(payload, matrices, back)
    assert torch.equal(back[matrices:], flat[matrices:]) and not back[100:400].any()
    difference = (back.double() - flat.double()).square().mean().sqrt() / flat.double().square().mean().sqrt()
    assert error * 0.7 <= float(difference) <= error


@pytest.mark.parametrize("kept", COSTS)
def test_rows_decoded_together_are_the_same(kept: FrozenDtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on an accelerator: several whole rows at once, then the last one, which is shorter."""
    monkeypatch.setattr(frozen_weights, "ROW_ELEMENTS", 4096)
    matrices = 5 * 4096 + 2048
    flat = torch.randn(matrices + 2048, generator=torch.Generator().manual_seed(0)).bfloat16()
    payload = torch.empty(kept.used_nbytes(matrices, 2048, flat.dtype) + PAGE, dtype=torch.uint8)
    kept.encode(flat, matrices, payload)
    one_by_one, together = torch.zeros_like(flat), torch.zeros_like(flat)
    kept.decode(payload, matrices, one_by_one)
    monkeypatch.setattr(frozen_weights, "_rows_at_once", lambda device: 2)
    kept.decode(payload, matrices, together)
    assert torch.equal(one_by_one, together) and together.any()


@pytest.mark.parametrize("kept", [FrozenDtype.INT8, FrozenDtype.NF4])
def test_a_late_failure_to_compile_decodes_few_rows_at_once(
    kept: FrozenDtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A small function compiles, and what decodes does not: memory for more rows is in no plan."""
    monkeypatch.setattr(frozen_weights, "ROW_ELEMENTS", 4096)
    matrices = 30 * 4096
    flat = torch.randn(matrices, generator=torch.Generator().manual_seed(0)).bfloat16()
    payload = torch.empty(kept.used_nbytes(matrices, 0, flat.dtype), dtype=torch.uint8)
    kept.encode(flat, matrices, payload)
    expected, back = torch.zeros_like(flat), torch.zeros_like(flat)
    kept.decode(payload, matrices, expected)
    rows = []

    def compiled(function: Callable[..., None], *_: object) -> Callable[..., None]:
        if function is quantization._try:
            return function
        raise RuntimeError("no registers left")

    def noted(function: Callable[..., None], device: torch.device, *arguments: Any) -> None:
        run(function, device, *arguments)
        rows.extend(
            len(each) for each in arguments if each is not None and getattr(each, "dtype", 0) == flat.dtype
        )

    run = quantization.run_fused
    monkeypatch.setattr(quantization, "_compiled", compiled)
    monkeypatch.setattr(quantization, "run_fused", noted)
    monkeypatch.setattr(quantization, "_failures", [])
    quantization.fuses.cache_clear()
    with force_kernels("cuda"), pytest.warns(UserWarning, match="no registers left"):
        kept.decode(payload, matrices, back)
    quantization.fuses.cache_clear()
    assert torch.equal(back, expected)
    assert max(rows) == frozen_weights.ROWS_ON_ACCELERATORS and sum(rows) == 30


@pytest.mark.parametrize(("family", "name", "dtype"), [("llama", "int8", "bf16"), ("gpt2", "nf4", "fp32")])
def test_the_engine_computes_with_what_is_kept(family: str, name: str, dtype: str, tmp_path: Path) -> None:
    """Equal, bit for bit, to an in-memory model whose weights are those that the store gives back."""
    torch.manual_seed(1)
    AutoModelForCausalLM.from_config(tiny_configs()[family]).save_pretrained(tmp_path / "model")
    ssd, feed = directories(tmp_path, 2), batches(4, packed=True)
    options = {"adapters": AdapterOptions(4, targets=("all-linear",)), "frozen_dtype": name, "micro_batch": 2}
    wide = torch.float32 if dtype == "fp32" else torch.bfloat16
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        real = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=wide)
        torch.manual_seed(0)
        twin = InMemory(get_peft_model(real, AdapterOptions(4, targets=("all-linear",)).peft_config()))
        with plain_engine(tmp_path / "model", ssd, dtype, **options) as trained:
            changed = 0
            for key, value in trained.named_parameters():
                parameter = real.get_parameter(key)
                changed += not torch.equal(value.to(wide), parameter)
                parameter.data.copy_(value)
            assert changed == 3 * (7 if family == "llama" else 4)  # the blocks' matrices
            train(trained, twin, feed[:2], 2)
            trained.flush()
            assert trained.io_bytes() == trained.planned_io_bytes()
        with plain_engine(tmp_path / "model", ssd, dtype, resume=True, **options) as trained:
            train(trained, twin, feed[2:], 2)
            compare(trained, real)
        with pytest.raises(UserError, match="another model"):
            plain_engine(tmp_path / "model", ssd, dtype, resume=True, adapters=AdapterOptions(4))


def test_names(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="int8 or nf4"):
        plain_engine(tmp_path, [], frozen_dtype="int4")
