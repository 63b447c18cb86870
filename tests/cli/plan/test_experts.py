"""A plan says what adapters on routed experts cost, and what it is without them."""

import json
import re
from pathlib import Path

import pytest
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM

from cli.plan.described import format_days
from common.units import format_bytes, format_count
from tests.cli.conftest import Finetune

HARDWARE = ("--gpu", "3090", "--drive", "samsung-990-pro-2tb", "--host-memory", "8GiB")
SIZES = {
    "vocab_size": 384, "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32, "num_hidden_layers": 3,
    "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
LATENT = {
    "n_routed_experts": 8, "n_group": 2, "topk_group": 1, "q_lora_rank": 32, "kv_lora_rank": 16,
    "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16, "first_k_dense_replace": 1,
}  # fmt: skip
FAMILIES = {
    "qwen3_moe": ({"num_experts": 8, "head_dim": 32}, "k_proj o_proj q_proj v_proj"),
    "deepseek_v3": (LATENT, "kv_a_proj_with_mqa kv_b_proj o_proj q_a_proj q_b_proj"),
}


@pytest.fixture(params=FAMILIES)
def mixture(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, str]:
    """A mixture, and the names of its linear layers that are neither experts nor routers."""
    more, dense = FAMILIES[request.param]
    config = AutoConfig.for_model(request.param, **SIZES, num_experts_per_tok=2, **more)
    config.architectures = [AutoModelForCausalLM._model_mapping[type(config)].__name__]
    config.save_pretrained(tmp_path / "mixture")
    return tmp_path / "mixture", dense


def adapters(model: Path, targets: object) -> dict[str, int]:
    """Return the sizes of peft's adapters of a model, by name."""
    adapted = get_peft_model(
        AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model)),
        LoraConfig(r=4, target_modules=targets, task_type="CAUSAL_LM"),
    )
    return {name: value.numel() for name, value in adapted.named_parameters() if value.requires_grad}


def test_adapters_on_routed_experts(finetune: Finetune, mixture: tuple[Path, str]) -> None:
    model, dense = mixture
    line = ("plan", *HARDWARE, "--model", model, "--seq-len", 32, "--lora-rank", 4, "--lora-targets")
    text = " ".join(finetune(*line, "all-linear").out.split())
    said = re.search(r" experts (\d.*); without those \(--lora-targets dense-linear\): (.*)$", text)
    assert said is not None
    everywhere, elsewhere = adapters(model, "all-linear"), adapters(model, dense.split())
    experts = sum(count for name, count in everywhere.items() if ".experts." in name)
    planned = json.loads(finetune(*line, "all-linear", "--json").out)
    without = json.loads(finetune(*line[:-1], "--json").out)
    assert (
        without["ssd_written_bytes_per_step"]
        == json.loads(finetune(*line, *dense.split(), "--json").out)["ssd_written_bytes_per_step"]
    )
    (other,) = planned["alternatives"]
    for shown, plan, parameters in ((said[1], planned, everywhere), (said[2], without, elsewhere)):
        count = format_count(sum(parameters.values()))
        assert shown.startswith(f"{count} adapter parameters" if plan is planned else f"{count} parameters")
        assert f"{format_bytes(plan['ssd_written_bytes_per_step'])} written per step" in shown
        assert f"{format_days(plan['drive_life_days'])} days of drive life" in shown
        assert f"{format_count(plan['tokens_per_second'])} tokens/s" in shown
    assert f"{format_count(experts)} of them on routed experts" in said[1] and experts
    assert other["ssd_written_bytes_per_step"] == without["ssd_written_bytes_per_step"]
    assert without["ssd_written_bytes_per_step"] < planned["ssd_written_bytes_per_step"]
    assert without["alternatives"] == [], "which has no adapters there"


def test_of_a_saved_configuration_no_option_takes_them_away(
    finetune: Finetune, mixture: tuple[Path, str]
) -> None:
    model, _ = mixture
    LoraConfig(r=4, target_modules="all-linear").save_pretrained("rank-4")
    out = finetune("plan", *HARDWARE, "--model", model, "--seq-len", 32, "--peft-config", "rank-4").out
    text = " ".join(out.split())
    assert "of them on routed experts" in text and "without those" not in text


def test_a_dense_model_has_no_such_line(finetune: Finetune) -> None:
    out = finetune("plan", *HARDWARE, "--model", "llama-10m", "--lora-rank", 4).out
    assert "routed experts" not in out
