"""The command with a checkpoint in few bits: what it says, what it plans, and what it writes."""

import json
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from common.units import format_count
from tests.cli.conftest import Finetune
from tests.common.models.checkpoint.compressed.cases import compressed

HARDWARE = ("--gpu", "4090", "--drive", "p5510", "--ssds", 1, "--host-memory", "8GiB")
BATCH = ("--batch-size", 2, "--seq-len", 32)
SIZES = {"hidden_size": 128, "intermediate_size": 256, "moe_intermediate_size": 128}


@pytest.mark.slow
def test_lora_keeps_the_checkpoints_bytes(finetune: Finetune, tmp_path: Path) -> None:
    """Experts that are adapted cannot be traced without values, which a plan can do without."""
    directory, _ = compressed(tmp_path, "deepseek_v3", "fp8", **SIZES)
    lora = ("--model", directory, "--dtype", "bf16", "--lora-rank", 4, *BATCH)
    plans = {}
    for kept in ((), ("--frozen-dtype", "plain")):
        outcome = finetune("--plan", *lora, *kept, *HARDWARE, "--json")
        plans[kept] = json.loads(outcome.out)
        assert outcome.status == 0 and plans[kept]["fits"]
    own, plain = (plan["ssd_bytes"] for plan in plans.values())
    assert own < plain
    outcome = finetune(*lora, "--steps", 1, "--output", tmp_path / "out")
    assert outcome.status == 0, outcome.err
    said = " ".join(outcome.out.split() + outcome.err.split())
    assert "weights fp8 in the checkpoint, frozen in its own bytes; they compute in bf16" in said
    files = sum(file.stat().st_size for file in (tmp_path / "out/store").rglob("weights.*"))
    assert own <= files < own + (1 << 20)
    words = ("export", "--model", directory, "--adapter", tmp_path / "out", "--output", tmp_path / "merged")
    assert finetune(*words).status == 0
    assert "quantization_config" not in json.loads((tmp_path / "merged/config.json").read_text())


@pytest.mark.slow
def test_experts_that_pieces_would_cut_are_wider(finetune: Finetune, tmp_path: Path) -> None:
    """The experts of a checkpoint in MXFP4 are one tensor, and so are plain numbers in pieces: reported and counted;
    and a reference cannot pass through them."""
    directory, _ = compressed(tmp_path, "gpt_oss", "mxfp4", **SIZES)
    lora = ("--model", directory, "--dtype", "bf16", "--lora-rank", 4, *BATCH, "--piece-size", "128KiB")
    outcome = finetune("--plan", *lora, *HARDWARE, "--json")
    planned = json.loads(outcome.out)["ssd_bytes"]
    plan = " ".join(finetune("--plan", *lora, *HARDWARE).out.split())
    experts = format_count(2 * 4 * 3 * 128 * 256)
    assert "blocks in pieces of at most 128 KiB in the compute dtype" in plan
    assert f"{experts} weights of the compressed checkpoint in the compute dtype on SSD" in plan
    outcome = finetune(*lora, "--steps", 1, "--output", tmp_path / "out")
    assert outcome.status == 0, outcome.err
    said = " ".join(outcome.out.split() + outcome.err.split())
    assert f"own bytes (but for {experts}, whose tensors blocks in pieces would cut)" in said
    files = sum(file.stat().st_size for file in (tmp_path / "out/store").rglob("weights.*"))
    assert planned <= files < planned + (1 << 20)


def test_all_weights_are_written_plain(finetune: Finetune, tmp_path: Path) -> None:
    directory, _ = compressed(tmp_path, "llama", "int4")
    outcome = finetune(
        "--model", directory, "--dtype", "bf16", *BATCH, "--steps", 1, "--output", tmp_path / "out"
    )
    assert outcome.status == 0, outcome.err
    said = " ".join(outcome.out.split() + outcome.err.split())
    assert "weights compressed-tensors in the checkpoint, dequantized; written as bf16" in said
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").config.architectures == ["LlamaForCausalLM"]


def test_a_plain_checkpoint_has_no_bytes_to_keep(finetune: Finetune, tmp_path: Path) -> None:
    _, twin = compressed(tmp_path, "llama", "fp8")
    outcome = finetune(
        "--plan", "--model", twin, "--lora-rank", 4, "--frozen-dtype", "checkpoint", *BATCH, *HARDWARE
    )
    assert outcome.status != 0 and "is not compressed: leave it out" in " ".join(outcome.err.split())
