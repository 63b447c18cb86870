"""Reinforcement learning out of core: a small model learns to sort digits as it is rewarded, by GRPO.

    python examples/grpo.py DIR [--steps 40]

A model first learns from texts in which digits are sorted up or down, by chance. Then only what is sorted upwards is
rewarded. Answers come from a server on this machine that loads the exported adapters before each rollout
(examples/generation_server.py stands in for one such as vLLM). The loss is a formula in PyTorch; the reference is the
model without its adapters, which the same pass over the weights computes.
"""

import argparse
import json
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from generation_server import GenerationServer
from grpo_loss import GrpoConfig, Rollouts, group_advantages, grpo_loss, rollouts_of
from transformers import LlamaConfig, LlamaForCausalLM

import fuyou
from common.models.adapters.options import AdapterOptions

END, EQUALS, ZERO, VOCABULARY = 1, 2, 3, 16
"""Tokens: the end of a text, what stands before an answer, the digit 0 (the others follow), and how many there are."""
LEARNED_ROWS, BUDGET = 64, "600MiB"
Answers = tuple[list[torch.Tensor], list[torch.Tensor]]
"""Tokens of each answer, and their log-probabilities."""


@dataclass(frozen=True)
class Task:
    """Sorting a number of digits."""

    digits: int

    @property
    def tokens(self) -> int:
        """Tokens of a prompt with its answer."""
        return 2 * self.digits + 2

    def prompts(self, count: int, generator: torch.Generator) -> torch.Tensor:
        """Return prompts of chance digits, int64 ``[count, digits + 1]``."""
        digits = torch.randint(10, (count, self.digits), generator=generator) + ZERO
        return torch.cat([digits, torch.full((count, 1), EQUALS)], 1)

    def texts(self, count: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
        """Return prompts with answers that are sorted up or down, by chance, as a batch."""
        prompts = self.prompts(count, generator)
        up = prompts[:, :-1].sort(1).values
        chance = torch.rand(count, 1, generator=generator) < 0.5
        ids = torch.cat([prompts, torch.where(chance, up, up.flip(1)), torch.full((count, 1), END)], 1)
        labels = ids.clone()
        labels[:, : self.digits + 1] = -100
        return {"input_ids": ids, "labels": labels}

    def reward(self, prompt: torch.Tensor, answer: torch.Tensor) -> float:
        """Return 1 for the digits of the prompt in ascending order, then the end; else 0."""
        ascending = [*prompt[:-1].sort().values.tolist(), END]
        return float(answer.tolist() == ascending)


def learned_model(task: Task, folder: Path, steps: int) -> Path:
    """Return the checkpoint of a model that has learned to sort, up or down; the one that is there for 0 steps."""
    if not steps:
        return folder / "learned"
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=176,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
        bos_token_id=None,
        eos_token_id=END,
    )
    LlamaForCausalLM(config).save_pretrained(folder / "random")
    generator = torch.Generator().manual_seed(1)
    options = {
        "batch_shape": (LEARNED_ROWS, task.tokens),
        "micro_batch": LEARNED_ROWS,
        "lr": 3e-3,
        "dtype": "fp32",
    }
    with fuyou.Engine(
        folder / "random",
        ssd=[folder],
        run_name="learning",
        overwrite=True,
        host_memory=BUDGET,
        prove=False,
        **options,
    ) as engine:
        for step in range(steps):
            engine.lr = 3e-3 * min(1.0, (step + 1) / 20, (steps - step) / (steps / 2))
            engine(**task.texts(LEARNED_ROWS, generator)).loss.backward()
            report = engine.step()
        print(f"learned to sort in {steps} steps: loss {report.loss:.3f}", flush=True)
        engine.save_pretrained(folder / "learned")
    return folder / "learned"


@dataclass
class ServerRollouts:
    """Answers from a server that holds the model in memory and loads the newest adapters before each rollout."""

    engine: fuyou.Engine
    server: GenerationServer
    folder: Path

    def answers(self, prompts: list[torch.Tensor], most: int, seed: int | None) -> Answers:
        """Return the tokens of each answer and their log-probabilities; without a seed, the likeliest tokens."""
        self.engine.save_pretrained(self.folder)
        self.server.load(self.folder)
        return self.server.generate(prompts, most, seed)


def update(engine: fuyou.Engine, rollouts: Rollouts, advantages: torch.Tensor, config: GrpoConfig) -> float:
    """Take one step on what was generated; return the loss."""
    out = engine.tokens(**rollouts.batch, reference=config.beta > 0)
    reference = None if out.reference is None else out.reference.log_probs
    loss = grpo_loss(out.log_probs, rollouts.old_log_probs, advantages, out.mask, config, reference)
    engine.backward(loss)
    engine.step()
    return loss.item()


def train(
    source: ServerRollouts, task: Task, config: GrpoConfig, prompts: int, steps: int, updates: int
) -> list[float]:
    """Generate, reward and learn; return the mean reward of each step."""
    generator, rewards = torch.Generator().manual_seed(2), list[float]()
    for step in range(steps):
        start = time.monotonic()
        repeated = task.prompts(prompts, generator).repeat_interleave(config.num_generations, 0)
        answers, log_probs = source.answers(list(repeated), task.digits + 1, seed=step)
        generated = time.monotonic() - start
        given = torch.tensor(
            [task.reward(prompt, answer) for prompt, answer in zip(repeated, answers, strict=True)]
        )
        advantages, rollouts = (
            group_advantages(given, config),
            rollouts_of(list(repeated), answers, log_probs),
        )
        losses = [update(source.engine, rollouts, advantages, config) for _ in range(updates)]
        rewards.append(given.mean().item())
        line = {"step": step + 1, "reward": rewards[-1], "loss": losses[0], "generating_seconds": generated}
        print(json.dumps(line | {"seconds": time.monotonic() - start}), flush=True)
    return rewards


def sorted_upwards(source: ServerRollouts, task: Task, count: int) -> float:
    """Return how often the likeliest answer is the right one, to prompts that were not trained on."""
    prompts = list(task.prompts(count, torch.Generator().manual_seed(3)))
    answers, _ = source.answers(prompts, task.digits + 1, seed=None)
    return sum(task.reward(prompt, answer) for prompt, answer in zip(prompts, answers, strict=True)) / count


def main(arguments: list[str] | None = None) -> list[float]:
    """Learn to sort, then to sort upwards; return the mean reward of each step."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--digits", type=int, default=5)
    parser.add_argument(
        "--learning-steps", type=int, default=400, help="0: continue from what an earlier run learned"
    )
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--updates", type=int, default=2, help="steps on each rollout")
    parser.add_argument("--lr", type=float, default=3e-3)
    options = parser.parse_args(arguments)
    options.folder.mkdir(parents=True, exist_ok=True)
    task, config = Task(options.digits), GrpoConfig(num_generations=8, beta=0.02)
    checkpoint = learned_model(task, options.folder, options.learning_steps)
    rows = options.prompts * config.num_generations
    engine = fuyou.Engine(
        checkpoint,
        ssd=[options.folder],
        run_name="grpo",
        overwrite=True,
        prove=False,
        host_memory=BUDGET,
        dtype="fp32",
        lr=options.lr,
        max_grad_norm=1.0,
        adapters=AdapterOptions(rank=8, alpha=16),
        batch_shape=(rows, task.tokens),
        token_outputs=1,
        reference=True,
    )
    with engine, GenerationServer(checkpoint) as server:
        source = ServerRollouts(engine, server, options.folder / "adapters")
        print(f"sorted upwards, of {rows} others: {sorted_upwards(source, task, rows):.1%}", flush=True)
        rewards = train(source, task, config, options.prompts, options.steps, options.updates)
        print(f"sorted upwards, of {rows} others: {sorted_upwards(source, task, rows):.1%}", flush=True)
    return rewards


if __name__ == "__main__":
    main()
