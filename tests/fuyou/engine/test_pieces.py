"""Blocks in pieces: bit for bit the model in memory, for all that can be trained, however a block is cut."""

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM, Qwen3MoeConfig

import fuyou
from common.errors import UserError
from common.models.adapters.options import AdapterOptions
from fuyou.layout.record import Kind
from tests.helpers.adapters import DTYPES, InMemory, train
from tests.helpers.adapters import compare as compare_adapters
from tests.helpers.engines import OPTIONS, ROWS, batches, compare, directories, engine
from tests.helpers.evicted import evicted_is_nan
from tests.helpers.models.mixtures import mixture_configs
from tests.helpers.rounding import ALIGNED_ALIKE
from tests.helpers.twin import Twin, tiny_configs


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One checkpoint per family, with values that are not all alike."""
    root = tmp_path_factory.mktemp("checkpoints")
    for name, config in (tiny_configs() | mixture_configs()).items():
        torch.manual_seed(1)
        AutoModelForCausalLM.from_config(config).save_pretrained(root / name)
    return root


def pieces(trained: fuyou.Engine) -> int:
    """Number of pieces of the block that has most."""
    return max(len(block) for block in trained._run.layout.blocks)


@pytest.mark.parametrize(("family", "dtype", "micro", "size"), [
    ("llama", "bf16", 2, "8KiB"),
    pytest.param("gpt2", "bf16", 4, "8KiB", marks=pytest.mark.slow),
    ("qwen3-moe", "bf16", 1, "12KiB"),
    pytest.param("mixtral", "fp32", 2, "60KiB", marks=pytest.mark.slow),
    pytest.param("deepseek-v3", "fp32", 4, "24KiB", marks=pytest.mark.slow),
    pytest.param("gpt-oss", "bf16", 3, "12KiB", marks=pytest.mark.slow),
])  # fmt: skip
def test_full_fine_tuning(
    family: str, dtype: str, micro: int, size: str, checkpoints: Path, tmp_path: Path
) -> None:
    """Clipped steps of packed rows; what has been evicted from the device is NaN."""
    model, feed = checkpoints / family, batches(3, packed=family not in mixture_configs())
    twin = Twin(str(model), bf16=dtype == "bf16", max_grad_norm=0.5, **OPTIONS)
    options = {"micro_batch": micro, "max_grad_norm": 0.5, "piece_size": size}
    with (
        engine(model, directories(tmp_path, 2), dtype, **options) as trained,
        evicted_is_nan(trained) as evicted,
    ):
        assert pieces(trained) > 2
        for batch in feed:
            out = trained(**batch)
            out.loss.backward()
            trained.step()
            assert out.loss.item() == twin.step(batch, micro)
        assert len(evicted) > 3 * pieces(trained)
        compare(trained, twin)
        assert trained.io_bytes() == trained.planned_io_bytes()


ATTENTION = ["q_proj", "k_proj", "o_proj"]


@pytest.mark.parametrize(("family", "dtype", "micro", "targets", "whole"), [
    ("qwen3-moe", "fp32", 4, "all-linear", None),  # attention, routers, and experts in ranges
    pytest.param("qwen3-moe", "fp32", 2, "all-linear", ["q_norm", "model.norm", "lm_head"], marks=pytest.mark.slow),
    *(
        pytest.param(*case, None, marks=pytest.mark.slow)
        for case in (
            ("llama", "bf16", 1, ATTENTION),
            ("deepseek-v3", "fp32", 2, ["q_b_proj", "kv_b_proj", "o_proj"]),
            ("gpt-oss", "bf16", 4, ATTENTION),
        )
    ),
    pytest.param("qwen3-moe", "bf16", 2, "all-linear", None, marks=[
        pytest.mark.slow, pytest.mark.skipif(not ALIGNED_ALIKE, reason="needs AVX-512"),
    ]),
])  # fmt: skip
def test_adapters_next_to_frozen_pieces(
    family: str,
    dtype: str,
    micro: int,
    targets: Any,
    whole: list[str] | None,
    checkpoints: Path,
    tmp_path: Path,
) -> None:
    def adapters() -> LoraConfig:
        return LoraConfig(
            r=4, lora_alpha=8, target_modules=targets, task_type="CAUSAL_LM", modules_to_save=whole
        )

    model = checkpoints / family
    real = AutoModelForCausalLM.from_pretrained(model, dtype=DTYPES[dtype])
    torch.manual_seed(0)
    twin = InMemory(get_peft_model(real, adapters()), 0.2)
    options = {"adapters": adapters(), "micro_batch": micro, "max_grad_norm": 0.2, "piece_size": "8KiB"}
    with engine(model, directories(tmp_path, 1), dtype, **options) as trained, evicted_is_nan(trained):
        assert pieces(trained) > 2
        if targets == "all-linear":
            slots = [slot for record in trained._run.layout.of_kind(Kind.BLOCK) for slot in record.parameters]
            assert len({slot.experts for slot in slots if slot.experts}) > 1
            assert any(".experts." in name for name, _ in trained.named_parameters() if "lora_A" in name)
        train(trained, twin, batches(3, packed=family not in mixture_configs()), micro)
        compare_adapters(trained, twin.model.get_base_model())
        assert trained.io_bytes() == trained.planned_io_bytes()


def test_resume_keeps_the_pieces_and_every_bit(checkpoints: Path, tmp_path: Path) -> None:
    """Three steps; a resume with another size, which does not count, on another drive; two more; then export."""
    model, (*ssd, other), feed = checkpoints / "qwen3-moe", directories(tmp_path, 3), batches(5, packed=True)
    twin = Twin(str(model), bf16=True, max_grad_norm=0.5, **OPTIONS)
    options = {"micro_batch": 2, "max_grad_norm": 0.5}

    def steps(trained: fuyou.Engine, some: list[dict[str, torch.Tensor]]) -> None:
        for batch in some:
            out = trained(**batch)
            out.loss.backward()
            trained.step()
            assert out.loss.item() == twin.step(batch, 2)

    with engine(model, ssd, piece_size="12KiB", **options) as trained:
        count = pieces(trained)
        steps(trained, feed[:3])
    with engine(model, [other], leave_ssd=ssd, resume=True, piece_size="40KiB", **options) as trained:
        assert pieces(trained) == count and trained.step_count == 3
        steps(trained, feed[3:])
        compare(trained, twin)
        trained.save_pretrained(tmp_path / "exported")
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "exported", dtype=torch.bfloat16)
    for name, value in exported.named_parameters():
        assert torch.equal(value, twin.model.get_parameter(name)), name


def test_blocks_are_cut_where_they_do_not_fit(tmp_path: Path) -> None:
    """A block that fits stays whole; with less memory on the device it is cut, trains on, and stays within it."""
    config = Qwen3MoeConfig(
        vocab_size=211, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, moe_intermediate_size=256, num_experts=32, num_experts_per_tok=2,
    )  # fmt: skip
    with engine(config, directories(tmp_path, 1), "fp32", micro_batch=ROWS) as whole:
        assert pieces(whole) == 1
        block = whole._run.layout.block_elements * 4
    with engine(
        config, [tmp_path / "ssd0"], "fp32", micro_batch=ROWS, device_memory=2 * block, overwrite=True
    ) as cut:
        assert pieces(cut) > 2
        assert cut.memory_plan.device_bytes <= 2 * block
        for batch in batches(2, packed=False):
            cut(**batch).loss.backward()
            cut.step()


@pytest.mark.parametrize(("options", "experts", "message"), [
    ({"piece_size": 0}, None, "piece_size"),
    ({"piece_size": "8KiB", "reference": True, "token_outputs": 1, "adapters": AdapterOptions(4)}, None,
     "no reference passes yet: give more memory"),
    ({"piece_size": "8KiB", "reference": True, "token_outputs": 1}, None, "this run trains the weights themselves"),
    ({"piece_size": "8KiB", "trainable": ["*.experts.*"]}, None, "are trained next to frozen parameters of their"),
    ({"piece_size": "8KiB"}, "batched_mm", "'batched_mm', which cannot be cut in pieces"),
])  # fmt: skip
def test_what_cannot_be_is_rejected_before_anything_is_written(
    options: dict[str, Any], experts: str | None, message: str, checkpoints: Path, tmp_path: Path
) -> None:
    """What else a block may do that cannot be cut: tests/fuyou/pieces/test_division.py."""
    config = AutoConfig.from_pretrained(checkpoints / "qwen3-moe")
    config._experts_implementation = experts
    with pytest.raises(UserError, match=message):
        engine(config, directories(tmp_path, 1), **options)
    assert not list((tmp_path / "ssd0").iterdir())
