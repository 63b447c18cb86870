"""The command with a block that is larger than the device."""

from pathlib import Path

from transformers import Qwen3MoeConfig

from tests.cli.conftest import Finetune
from tests.helpers.models.families import saved


def test_budgets_that_hold_no_whole_block(finetune: Finetune, tmp_path: Path) -> None:
    """A budget that is typed is checked before the data are read: against pieces, where whole blocks do not fit."""
    config = Qwen3MoeConfig(
        vocab_size=211, hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, moe_intermediate_size=256, num_experts=32, num_experts_per_tok=2,
    )  # fmt: skip
    words = (
        "--model",
        saved(tmp_path / "model", config),
        "--dtype",
        "bf16",
        "--batch-size",
        2,
        "--seq-len",
        32,
    )
    words += ("--steps", 1, "--output", tmp_path / "out", "--no-save", "--device-memory")
    outcome = finetune(*words, "8MiB")
    assert outcome.status == 0, outcome.err
    outcome = finetune(*words, "128KiB", "--overwrite")
    assert outcome.status == 2 and "of at least" in outcome.err
