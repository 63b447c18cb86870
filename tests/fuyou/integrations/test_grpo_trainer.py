"""TRL's GRPOTrainer on the engine's facade: answers come from elsewhere, or the call is rejected."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import fuyou
from common.errors import UserError
from fuyou.integrations import EngineOptimizer, as_model
from tests.helpers.models.small_checkpoints import small_checkpoint

ROWS, GROUP, NEW, STEPS, LR = 8, 4, 6, 3, 1e-3


pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_checkpoint(tmp_path_factory.mktemp("checkpoint"))


def opened(checkpoint: Path, ssd: Path) -> fuyou.Engine:
    options = {"host_memory": "600MiB", "dtype": "fp32", "lr": LR, "weight_decay": 0.0, "max_grad_norm": 1.0}
    return fuyou.Engine(checkpoint, ssd=[ssd], micro_batch=3, **options)


def answers(prompts: list[str], trainer: Any) -> dict[str, Any]:
    """Answers that depend on the step alone."""
    generator = torch.Generator().manual_seed(trainer.state.global_step)
    completions = torch.randint(3, 384, (len(prompts), NEW), generator=generator).tolist()
    ids = [trainer.processing_class(prompt)["input_ids"] for prompt in prompts]
    return {"prompt_ids": ids, "completion_ids": completions, "logprobs": None}


def reward(completions: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
    """More for smaller tokens."""
    return [-sum(row) / len(row) / 384 for row in completion_ids]


def trainer_of(
    model: Any, optimizer: torch.optim.Optimizer, folder: Path, rollout: Any, tokenizer: Any
) -> Any:
    trl = pytest.importorskip("trl")
    from datasets import Dataset

    args = trl.GRPOConfig(
        output_dir=str(folder), max_steps=STEPS, per_device_train_batch_size=ROWS, num_generations=GROUP,
        max_completion_length=NEW, beta=0.0, learning_rate=LR, logging_steps=1, report_to=[], use_cpu=True,
        save_strategy="no", weight_decay=0.0, seed=3, max_grad_norm=1.0, disable_tqdm=True, bf16=False,
        gradient_accumulation_steps=1, lr_scheduler_type="constant",
    )  # fmt: skip
    data = Dataset.from_list([{"prompt": f"say {word}"} for word in ("one", "two", "three", "four")])
    return trl.GRPOTrainer(
        model, reward, args=args, train_dataset=data, processing_class=tokenizer, optimizers=(optimizer, None),
        rollout_func=rollout,
    )  # fmt: skip


def test_answers_from_elsewhere(checkpoint: Path, tmp_path: Path) -> None:
    """A rollout_func gives both the same: so their steps are the same."""
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    adamw = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.0)
    memory = trainer_of(model, adamw, tmp_path / "memory", answers, tokenizer)
    memory.train()
    with opened(checkpoint, tmp_path) as trained:
        facade = as_model(trained)
        streamed = trainer_of(facade, EngineOptimizer(facade), tmp_path / "streamed", answers, tokenizer)
        streamed.train()
        for mine, theirs in zip(streamed.state.log_history[:-1], memory.state.log_history[:-1], strict=True):
            for name in ("loss", "grad_norm", "reward", "entropy"):
                assert mine[name] == pytest.approx(theirs[name], rel=1e-4, abs=2e-6), name
        expected = dict(model.named_parameters())
        for name, value in trained.named_parameters():
            torch.testing.assert_close(value, expected[name].data, rtol=1e-5, atol=2e-5)


def test_answers_of_the_model_are_rejected(checkpoint: Path, tmp_path: Path) -> None:
    """The trainer calls generate() of its model, as it does with any other."""
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    with opened(checkpoint, tmp_path) as trained:
        facade = as_model(trained)
        trainer = trainer_of(facade, EngineOptimizer(facade), tmp_path / "trainer", None, tokenizer)
        with pytest.raises(UserError, match=r"rollouts come from a server .* examples/grpo.py"):
            trainer.train()
        assert trained.step_count == 0
