"""GRPO: its formulas next to TRL's, a step next to the same step in memory, and what it reads next to a step of SFT."""

import math
from pathlib import Path

import pytest
import torch
from grpo_loss import GrpoConfig, Rollouts, group_advantages, grpo_loss, rollouts_of
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, LlamaConfig

import fuyou
from common.errors import UserError
from fuyou.layout.record import Kind
from tests.helpers.adapters import compare
from tests.helpers.engines import directories, engine
from tests.helpers.own_loss import OwnLossInMemory

PROMPTS, NEW, LAYERS = 3, 10, 12
CONFIG = GrpoConfig(num_generations=4, epsilon=0.1, beta=0.3)
OPTIONS = {
    "micro_batch": 4, "batch_shape": (PROMPTS * CONFIG.num_generations, 16), "token_outputs": 1, "reference": True,
}  # fmt: skip


pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=211, hidden_size=48, intermediate_size=64, num_hidden_layers=LAYERS, num_attention_heads=4,
        max_position_embeddings=64, eos_token_id=2,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def adapters() -> LoraConfig:
    return LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")


def generated(trained: fuyou.Engine, seed: int) -> tuple[Rollouts, torch.Tensor]:
    """Chance answers to a few prompts, as a server a little behind would give them, and their advantages: small tokens
    are rewarded."""
    generator = torch.Generator().manual_seed(seed)
    prompts = [torch.randint(3, 211, (3 + index,), generator=generator) for index in range(PROMPTS)]
    prompts = [prompt for prompt in prompts for _ in range(CONFIG.num_generations)]
    answers = [
        torch.randint(3, 211, (NEW - index % 3,), generator=generator) for index in range(len(prompts))
    ]
    unknown = rollouts_of(prompts, answers, [torch.zeros(len(answer)) for answer in answers])
    with torch.no_grad():
        now = trained.tokens(**unknown.batch)
    old = [
        row[mask] + 0.05 * torch.randn(int(mask.sum()), generator=generator)
        for row, mask in zip(now.log_probs, now.mask, strict=True)
    ]
    rewards = torch.tensor([float((row < 100).float().mean()) for row in answers])
    return rollouts_of(prompts, answers, old), group_advantages(rewards, CONFIG)


def test_the_loss_is_trls() -> None:
    """By its own formulas, written down once more as GRPOTrainer._compute_loss has them."""
    generator = torch.Generator().manual_seed(0)
    log_probs, old, reference = (-torch.rand(8, 5, generator=generator) for _ in range(3))
    mask = torch.rand(8, 5, generator=generator) < 0.7
    mask[:, 0] = True
    rewards = torch.rand(8, generator=generator)
    rewards[4:] = 0.5
    advantages = group_advantages(rewards, CONFIG)
    assert not advantages[4:].any()
    grouped = rewards.view(-1, 4)
    expected = (grouped - grouped.mean(1, keepdim=True)) / (grouped.std(1, keepdim=True) + 1e-4)
    torch.testing.assert_close(advantages, expected.flatten())
    coefficient = torch.exp(log_probs - old)
    first, second = (
        coefficient * advantages[:, None],
        torch.clamp(coefficient, 0.9, 1.1) * advantages[:, None],
    )
    kl = torch.exp(reference - log_probs) - (reference - log_probs) - 1
    per_token = -torch.min(first, second) + 0.3 * kl
    wanted = ((per_token * mask).sum(-1) / mask.sum(-1)).mean()
    torch.testing.assert_close(grpo_loss(log_probs, old, advantages, mask, CONFIG, reference), wanted)
    for options, message in (
        ({"num_generations": 1}, "at least 2"),
        ({"epsilon": 1.0}, "between 0 and 1"),
        ({"beta": -1.0}, "must not be negative"),
    ):
        with pytest.raises(UserError, match=message):
            GrpoConfig(**options)
    with pytest.raises(UserError, match="are not groups of 4"):
        group_advantages(torch.ones(6), CONFIG)


def test_steps_are_those_in_memory(checkpoint: Path, tmp_path: Path) -> None:
    """Two updates on each of two rollouts."""
    real = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    torch.manual_seed(0)
    twin = OwnLossInMemory(get_peft_model(real, adapters()), None)
    with engine(checkpoint, directories(tmp_path, 1), "fp32", adapters=adapters(), **OPTIONS) as trained:
        for seed in range(2):
            rollouts, advantages = generated(trained, seed)
            for _ in range(2):
                out = trained.tokens(**rollouts.batch, reference=True)
                arguments = rollouts.old_log_probs, advantages, out.mask, CONFIG
                loss = grpo_loss(out.log_probs, *arguments, out.reference.log_probs)
                trained.backward(loss)
                report = trained.step()

                def theirs(
                    numbers: dict, reference: torch.Tensor, arguments: tuple = arguments
                ) -> torch.Tensor:
                    return grpo_loss(numbers["log_probs"], *arguments, reference)

                expected = twin.loss_step(rollouts.batch, OPTIONS["micro_batch"], theirs, reference=True)
                assert loss.item() == pytest.approx(expected, rel=1e-5, abs=1e-7)
                assert math.isclose(report.grad_norm, twin.grad_norm, rel_tol=1e-5)
        compare(trained, twin.model.get_base_model())


@pytest.mark.slow
def test_the_training_part_reads_what_sft_reads(checkpoint: Path, tmp_path: Path) -> None:
    """The reference passes in the same visits; at most 1.02 of the bytes, counted at the drives."""
    read = {}
    with engine(checkpoint, directories(tmp_path, 1), "fp32", adapters=adapters(), **OPTIONS) as trained:
        rollouts, advantages = generated(trained, 0)
        for kind in ("sft", "grpo"):
            for number in range(3):
                trained.flush()
                before = trained.io_bytes()[0]
                if kind == "sft":
                    trained(**rollouts.batch).loss.backward()
                else:
                    out = trained.tokens(**rollouts.batch, reference=True)
                    arguments = rollouts.old_log_probs, advantages, out.mask, CONFIG
                    trained.backward(grpo_loss(out.log_probs, *arguments, out.reference.log_probs))
                trained.step()
                trained.flush()
                read[kind, number] = trained.io_bytes()[0] - before
        block = trained._run.layout.sizes[Kind.BLOCK].parameter_nbytes
    assert read["sft", 2] > LAYERS * block
    assert max(read["grpo", number] for number in range(3)) <= 1.02 * read["sft", 2]
