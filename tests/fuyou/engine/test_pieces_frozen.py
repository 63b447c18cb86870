"""Frozen weights in few bits, in pieces: to the bit as in whole blocks, and trained as in memory."""

from pathlib import Path

import pytest
import torch
from peft import get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM

from common.models.adapters.options import ALL_LINEAR, AdapterOptions
from fuyou.layout.frozen_weights import FrozenDtype
from fuyou.layout.record import Kind
from tests.common.models.checkpoint.compressed.cases import FAMILIES, compressed
from tests.helpers.adapters import DTYPES, InMemory, compare, train
from tests.helpers.engines import batches, directories, engine
from tests.helpers.evicted import evicted_is_nan
from tests.helpers.models.families import saved

ADAPTERS = AdapterOptions(4, 8.0, 0.0, (ALL_LINEAR,))


pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize(("family", "kept", "dtype", "micro", "size", "odd"), [
    ("llama", "int8", "bf16", 2, "12KiB", False),
    ("qwen3_moe", "nf4", "bf16", 2, "24KiB", False),
    ("deepseek_v3", "int8", "fp32", 4, "24KiB", False),
    ("qwen3_moe", "int8", "fp32", 2, "24KiB", True),
])  # fmt: skip
@pytest.mark.slow
def test_rounded_as_whole_blocks_are(
    family: str, kept: str, dtype: str, micro: int, size: str, odd: bool, tmp_path: Path
) -> None:
    """A frozen piece in int8 is rounded in the same blocks where each matrix, and each expert's, is whole blocks; where
    some are ``odd``, pieces have their own blocks, and training is that of the weights that they hold."""
    sizes = FAMILIES[family] | ({"hidden_size": 72, "moe_intermediate_size": 36} if odd else {})
    model = saved(tmp_path / "model", AutoConfig.for_model(family, **sizes))
    options = {"adapters": ADAPTERS, "frozen_dtype": kept, "micro_batch": micro}
    real = AutoModelForCausalLM.from_pretrained(model, dtype=DTYPES[dtype])
    torch.manual_seed(0)
    twin = InMemory(get_peft_model(real, ADAPTERS.peft_config()))
    ssd, other = directories(tmp_path, 2)
    with engine(model, [other], dtype, **options) as whole:
        for name, value in whole.named_parameters():
            real.get_parameter(name).data.copy_(value)
    with engine(model, [ssd], dtype, piece_size=size, **options) as trained, evicted_is_nan(trained):
        assert max(len(block) for block in trained._run.layout.blocks) > 2
        if odd:
            for name, value in trained.named_parameters():
                assert torch.allclose(real.get_parameter(name), value, atol=0.01)
                real.get_parameter(name).data.copy_(value)
        compare(trained, real)
        train(trained, twin, batches(2, packed=family == "llama"), micro)
        compare(trained, real)
        assert trained.io_bytes() == trained.planned_io_bytes()


@pytest.mark.parametrize(
    ("family", "method", "dtype", "micro", "plain"),
    [("deepseek_v3", "fp8", "bf16", 2, False), ("gpt_oss", "mxfp4", "bf16", 4, True)],
)
def test_bytes_of_a_compressed_checkpoint(
    family: str, method: str, dtype: str, micro: int, plain: bool, tmp_path: Path
) -> None:
    """A piece keeps the bytes of whole tensors; where all experts are one tensor of the file (``plain``), it cannot."""
    directory, twin_directory = compressed(tmp_path, family, method)
    real = AutoModelForCausalLM.from_pretrained(twin_directory, dtype=DTYPES[dtype])
    torch.manual_seed(0)
    adapters = AdapterOptions(4, targets=("q_proj",) if plain else (ALL_LINEAR,))
    twin = InMemory(get_peft_model(real, adapters.peft_config()))
    options = {"adapters": adapters, "micro_batch": micro, "piece_size": "12KiB"}
    with engine(directory, directories(tmp_path, 1), dtype, **options) as trained, evicted_is_nan(trained):
        layout = trained._run.layout
        assert max(len(block) for block in layout.blocks) > 2
        slots = [slot for record in layout.of_kind(Kind.BLOCK) for slot in record.parameters]
        assert {slot.compressed is None for slot in slots if slot.experts} == {plain}
        if plain:  # what is left of the block is plain anyway
            assert {record.frozen for record in layout.of_kind(Kind.BLOCK)} == {FrozenDtype.PLAIN}
        train(trained, twin, batches(2, packed=False), micro)
        compare(trained, real)
        assert trained.io_bytes() == trained.planned_io_bytes()
