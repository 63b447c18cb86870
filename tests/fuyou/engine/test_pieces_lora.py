"""Adapters on the experts of blocks in pieces equal the same peft model trained in memory, bit for bit."""

from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from fuyou.layout.record import Kind
from tests.helpers.adapters import DTYPES, InMemory, compare, train
from tests.helpers.engines import STEPS, batches, directories, engine
from tests.helpers.evicted import evicted_is_nan
from tests.helpers.rounding import ALIGNED_ALIKE
from tests.helpers.twin import save_checkpoints


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoints(tmp_path_factory.mktemp("checkpoints"), ("qwen3-moe",))


def adapters(whole: list[str] | None = None) -> LoraConfig:
    """Adapters of attention, routers and experts, as a user asks for them."""
    return LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM", modules_to_save=whole)


def in_memory(model: Path, dtype: str, clip: float | None, whole: list[str] | None = None) -> InMemory:
    real = AutoModelForCausalLM.from_pretrained(model, dtype=DTYPES[dtype])
    torch.manual_seed(0)
    return InMemory(get_peft_model(real, adapters(whole)), clip)


@pytest.mark.parametrize(
    ("dtype", "micro", "clip", "whole"),
    [
        ("fp32", 4, None, None),
        ("fp32", 2, None, ["norm", "lm_head"]),
        pytest.param("bf16", 2, 0.2, None, marks=pytest.mark.skipif(not ALIGNED_ALIKE, reason="needs AVX-512")),
    ],
)
def test_equals_peft_in_memory(
    dtype: str, micro: int, clip: float | None, whole: list[str] | None, checkpoints: Path, tmp_path: Path
) -> None:
    model = checkpoints / "qwen3-moe"
    twin = in_memory(model, dtype, clip, whole)
    options = {"adapters": adapters(whole), "micro_batch": micro, "max_grad_norm": clip, "piece_size": "8KiB"}
    with engine(model, directories(tmp_path, 1), dtype, **options) as trained, evicted_is_nan(trained):
        shape = trained._run.shape
        cut = {slot.experts for record in shape.of_kind(Kind.BLOCK) for slot in record.parameters if slot.experts}
        assert len(cut) > 1 and all(len(own) > 3 for own in shape.blocks)
        assert any(".experts." in name for name, _ in trained.named_parameters() if "lora_A" in name)
        train(trained, twin, batches(STEPS, packed=True), micro)
        compare(trained, twin.model.get_base_model())
        assert trained.io_bytes() == trained.planned_io_bytes()
