"""TRL's trainers on the engine's facade against the same trainers in memory: families, micro-batches, what is trained.

Five steps in fp32. Dropout draws the same numbers in both: every step begins with the same state of the generator.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
import trl
from peft import get_peft_model
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    GPT2Config,
    LlamaConfig,
    MixtralConfig,
    TrainerCallback,
)

import fuyou
from fuyou.integrations import EngineOptimizer, as_model, as_reference
from tests.helpers.models.small_checkpoints import SIZES, TOKENS, small_checkpoint
from tests.helpers.trl_data import adapters, decided_by_rounding, records

DROPOUT = {"resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1}
CONFIGS: dict[str, Any] = {
    "llama": LlamaConfig(**SIZES),
    "gpt2": GPT2Config(**TOKENS, n_embd=32, n_layer=2, n_head=2, n_positions=64, **DROPOUT),
    "mixtral": MixtralConfig(
        **SIZES,
        num_local_experts=4,
        num_experts_per_tok=2,
        output_router_logits=True,
        router_aux_loss_coef=0.05,
    ),
}
STEPS, LR = 5, 1e-3


pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("checkpoints")
    for name, config in CONFIGS.items():
        small_checkpoint(root / name, config)
        config = type(config).from_dict({**config.to_dict(), "num_labels": 1, "output_router_logits": False})
        small_checkpoint(root / f"{name}-reward", config, AutoModelForSequenceClassification)
    return root


class SameDropout(TrainerCallback):
    """Every step begins with the same state of the random generator."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        torch.manual_seed(state.global_step)


def trainer(kind: str, model: Any, reference: Any, optimizer: Any, folder: Path, tokenizer: Any) -> Any:
    options: dict[str, Any] = {
        "max_steps": STEPS, "per_device_train_batch_size": 4, "learning_rate": LR, "logging_steps": 1, "report_to": [],
        "use_cpu": True, "save_strategy": "no", "lr_scheduler_type": "cosine", "max_grad_norm": 1.0, "bf16": False,
        "disable_tqdm": True, "gradient_checkpointing": False, "max_length": 32,
    }  # fmt: skip
    data = {"train_dataset": records(kind), "processing_class": tokenizer, "optimizers": (optimizer, None)}
    data["callbacks"] = [SameDropout()]
    match kind:
        case "sft":
            options |= {"eval_strategy": "steps", "eval_steps": 3, "per_device_eval_batch_size": 5}
            # TRL's default: autocast, which the engine passes over, as it computes in its own dtype.
            options["bf16"] = isinstance(optimizer, EngineOptimizer)
            held_out = records(kind).select(range(5))
            return trl.SFTTrainer(model, trl.SFTConfig(str(folder), **options), eval_dataset=held_out, **data)
        case "sft packed":  # one row of several documents, which TRL describes in several ways
            return trl.SFTTrainer(model, trl.SFTConfig(str(folder), packing=True, **options), **data)
        case "dpo":
            weighted = isinstance(model.config, GPT2Config)
            options |= {
                "disable_dropout": False,
                "use_weighting": weighted,
                "precompute_ref_log_probs": not weighted,
            }
            return trl.DPOTrainer(model, reference, trl.DPOConfig(str(folder), beta=0.3, **options), **data)
        case "kto":
            return trl.KTOTrainer(model, reference, trl.KTOConfig(str(folder), beta=0.3, **options), **data)
    return trl.RewardTrainer(
        model,
        trl.RewardConfig(str(folder), disable_dropout=False, **options),
        **{**data, "train_dataset": records("dpo")},
    )


def figures(done: Any) -> list[dict[str, float]]:
    no = ("runtime", "per_second", "flos")
    return [{name: value for name, value in line.items() if not any(word in name for word in no)}
            for line in done.state.log_history]  # fmt: skip


@pytest.mark.parametrize(("kind", "family", "lora", "micro"), [
    ("sft", "gpt2", False, 4),
    ("dpo", "mixtral", True, 2),
    *(pytest.param(*case, marks=pytest.mark.slow) for case in [
        ("sft", "mixtral", False, 1),
        ("sft packed", "llama", False, 1),
        ("dpo", "gpt2", True, 8),
        ("kto", "llama", True, 1),
        ("kto", "mixtral", True, 4),
        ("reward", "llama", False, 2),
        ("reward", "gpt2", False, 8),
    ]),
])  # fmt: skip
def test_a_trainer_of_trl(
    kind: str, family: str, lora: bool, micro: int, checkpoints: Path, tmp_path: Path
) -> None:
    """Weights to 1e-5, and all that is logged, to 1e-5 of it."""
    path = checkpoints / (f"{family}-reward" if kind == "reward" else family)
    auto = AutoModelForSequenceClassification if kind == "reward" else AutoModelForCausalLM
    tokenizer = AutoTokenizer.from_pretrained(path)
    model: Any = auto.from_pretrained(path, dtype=torch.float32)
    if lora:
        torch.manual_seed(0)
        model = get_peft_model(model, adapters()).get_base_model()
    kept = auto.from_pretrained(path, dtype=torch.float32) if kind in ("dpo", "kto") else None
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    memory = trainer(
        kind, model, kept, torch.optim.AdamW(trained, lr=LR, weight_decay=0.0), tmp_path / "a", tokenizer
    )
    memory.train()
    (tmp_path / "ssd").mkdir()
    with fuyou.Engine(
        path, ssd=[tmp_path / "ssd"], host_memory="600MiB", dtype="fp32", lr=LR, weight_decay=0.0, max_grad_norm=1.0,
        adapters=adapters() if lora else None, micro_batch=micro,
    ) as engine:  # fmt: skip
        facade = as_model(engine)
        reference = as_reference(engine) if kept is not None else None
        streamed = trainer(kind, facade, reference, EngineOptimizer(facade), tmp_path / "b", tokenizer)
        streamed.train()
        for mine, theirs in zip(figures(streamed), figures(memory), strict=True):
            assert mine.keys() == theirs.keys()
            for name in mine.keys() - decided_by_rounding(theirs):
                assert mine[name] == pytest.approx(theirs[name], rel=1e-5, abs=1e-5), name
        expected: dict[str, nn.Parameter] = dict(model.named_parameters())
        for name, value in engine.named_parameters():
            # Both answers' scores have this bias: its gradient is rounding alone, which Adam scales up.
            apart = 1e-4 if kind == "reward" and name == "transformer.ln_f.bias" else 1e-5
            torch.testing.assert_close(value, expected[name].data, rtol=1e-5, atol=apart, msg=name)
