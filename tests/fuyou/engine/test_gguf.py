"""GGUF files, out of core: frozen weights keep the file's bytes, and train as in memory."""

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig, PreTrainedModel, Qwen3MoeConfig

from common.files import CACHE_VARIABLE
from common.models.adapters.options import AdapterOptions
from fuyou.layout.frozen_weights import FrozenDtype
from fuyou.layout.record import Kind
from tests.helpers.adapters import DTYPES, InMemory, compare, train
from tests.helpers.engines import batches, check, directories, engine
from tests.helpers.models.gguf_files import FAMILIES, FIELDS, LLAMA, write_gguf
from tests.helpers.models.small_checkpoints import SIZES

gguf = pytest.importorskip("gguf")
pytestmark = pytest.mark.filterwarnings("ignore")
WIDE = SIZES | {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4}  # whole blocks of 256
WIDE_FIELDS = FIELDS | {"embedding_length": 256, "feed_forward_length": 512, "attention.head_count": 4}
MIXED = ("Q4_K", "Q6_K", "Q2_K", "Q3_K", "Q5_K", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "F16", "BF16", "F32", "Q8_0")
ADAPTERS = AdapterOptions(4, targets=("all-linear",))
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 768}
EXPERT_FIELDS = {"attention.key_length": 16, "expert_count": 4, "expert_used_count": 2}
CASES: dict[str, tuple[PreTrainedConfig, dict[str, Any], tuple[str, ...]]] = {
    "llama": (LlamaConfig(**WIDE), WIDE_FIELDS, MIXED),
    "gemma2": (FAMILIES["gemma2"][0], FIELDS | FAMILIES["gemma2"][1], ("Q5_1", "Q4_0")),
    "qwen3_moe": (Qwen3MoeConfig(**LLAMA, **EXPERTS, head_dim=16), FIELDS | EXPERT_FIELDS, ("Q5_0",)),
}


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))


def written(folder: Path, family: str) -> Path:
    config, fields, kinds = CASES[family]
    return write_gguf(folder / "model.gguf", config, fields, kinds=kinds)


def in_memory(file: Path, dtype: str) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=DTYPES[dtype])


@pytest.mark.parametrize(("family", "dtype", "micro", "pieces"), [
    ("llama", "fp32", 2, None),
    ("llama", "bf16", 4, "400KiB"),
    ("gemma2", "bf16", 3, None),
    ("qwen3_moe", "bf16", 2, None),
    ("qwen3_moe", "fp32", 2, "600KiB"),
])  # fmt: skip
def test_lora_equals_peft_on_the_dequantized_model(
    family: str, dtype: str, micro: int, pieces: str | None, tmp_path: Path
) -> None:
    """Bit for bit, again after a resume; the bytes moved are those planned; and merging gives what peft makes."""
    file = written(tmp_path, family)
    torch.manual_seed(0)
    twin = InMemory(get_peft_model(in_memory(file, dtype), ADAPTERS.peft_config()))
    options = {"adapters": ADAPTERS, "micro_batch": micro, "piece_size": pieces}
    ssd, feed = directories(tmp_path, 2), batches(3, packed=False)
    with engine(file, ssd, dtype, **options) as trained:
        layout = trained._run.layout
        assert (max(len(block) for block in layout.blocks) > 1) is (pieces is not None)
        outer = layout.records[layout.embedding]
        assert outer.frozen is FrozenDtype.CHECKPOINT and not layout.widened
        train(trained, twin, feed[:2], micro)
        trained.flush()
        assert trained.io_bytes() == trained.planned_io_bytes()
    with engine(file, ssd, dtype, resume=True, **options) as trained:
        train(trained, twin, feed[2:], micro)
        compare(trained, twin.model.get_base_model())
        trained.save_pretrained(tmp_path / "adapter", merge=True)
    expected = PeftModel.from_pretrained(in_memory(file, dtype), tmp_path / "adapter").merge_and_unload()
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "adapter" / "merged", dtype=DTYPES[dtype])
    for name, value in expected.named_parameters():
        assert torch.equal(merged.get_parameter(name), value), name


def test_lora_in_chunks_equals_peft_on_the_dequantized_model(tmp_path: Path) -> None:
    file = written(tmp_path, "llama")
    torch.manual_seed(0)
    twin = InMemory(get_peft_model(in_memory(file, "fp32"), ADAPTERS.peft_config()))
    options = {"adapters": ADAPTERS, "micro_batch": 1, "chunk": 12}
    with engine(file, directories(tmp_path, 1), "fp32", **options) as trained:
        for batch in batches(2, packed=False):
            out = trained(**batch)
            out.loss.backward()
            report = trained.step()
            assert out.loss.item() == pytest.approx(twin.step(batch, 1), rel=1e-6)
            assert report.grad_norm == pytest.approx(twin.grad_norm, rel=1e-6)
        assert trained._run.runtime.memory_plan.batch.chunks == 3


def test_all_weights_are_trained_as_plain_numbers(tmp_path: Path) -> None:
    file = written(tmp_path, "gemma2")
    plain = in_memory(file, "fp32")
    plain.hf_quantizer = None  # which saves nothing
    plain.save_pretrained(tmp_path / "plain")
    check(tmp_path / "plain", directories(tmp_path, 1), dtype="bf16", micro_batch=2, packed=False, steps=1,
          trained_from=file)  # fmt: skip


def test_a_store_holds_the_bytes_of_the_file_and_the_cache_none(tmp_path: Path) -> None:
    """Matrices whose types take fewer bytes than what computes, and the embedding; others in 16 bits."""
    file = written(tmp_path, "llama")
    with engine(file, directories(tmp_path, 1), "bf16", adapters=ADAPTERS) as trained:
        records = trained._run.layout.records
    slots = [slot for record in records if record.kind is not Kind.ADAPTER for slot in record.parameters]
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(file).tensors}
    small = [tensor for tensor in tensors.values() if tensor.n_bytes < 2 * tensor.n_elements]
    assert len(small) > 10
    assert sum(slot.compressed.nbytes for slot in slots if slot.compressed) == sum(
        int(t.n_bytes) for t in small
    )
    stored = sum(record.device_nbytes for record in records if record.kind is not Kind.ADAPTER)
    least = sum(min(int(tensor.n_bytes), 2 * int(tensor.n_elements)) for tensor in tensors.values())
    assert least <= stored < least + len(slots) * 128 + len(records) * 8192
    kept = [path for path in (tmp_path / "cache").rglob("*") if path.is_file() and not path.is_symlink()]
    assert sum(path.stat().st_size for path in kept) < 200_000 < file.stat().st_size
