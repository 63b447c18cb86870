"""Claim: moments in 8 bits learn as moments in fp32 do; Lion at a lower learning rate is near.

Trains a small Llama of bytes (random weights, English text from Python itself) in memory with the engine's own
optimizers: split fp32 masters, bf16 weights and gradients, the same batches for all. That streaming changes no bit of
it is what tests/fuyou/engine/test_exact.py shows. A learning rate may follow an optimizer's name.

    python scripts/bench_optimizers.py --steps 300 adamw adamw8bit lion:3e-4
"""

import json
import math
import statistics
from pathlib import Path

import click
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from common.data.demo_text import demo_documents
from common.hardware.machine import describe_machine
from fuyou.layout.optimizer_state import OPTIMIZERS
from fuyou.layout.record import Kind, Precision, Record
from fuyou.layout.record_parts import wants_decay
from fuyou.optimizer.adam import AdamConfig, Update
from fuyou.optimizer.chunk_update import ChunkOptimizer
from fuyou.optimizer.kernel_trial import tried_kernels
from fuyou.optimizer.moments import OptimizerStates
from fuyou.optimizer.split_weights import split

ROWS, TOKENS, MEAN_OF = 8, 128, 20
"""Batch, and the steps over which a loss is averaged."""
LR, WARMUP = 2e-3, 0.1


class Run:
    """A model, and the states of one optimizer.

    Args:
        optimizer: its name.
        hidden, layers: size of the model.
    """

    def __init__(self, optimizer: str, hidden: int, layers: int):
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=256, hidden_size=hidden, intermediate_size=hidden * 3, num_hidden_layers=layers,
            num_attention_heads=hidden // 32, max_position_embeddings=TOKENS, tie_word_embeddings=False,
        )  # fmt: skip
        self.model = LlamaForCausalLM(config)
        named = dict(self.model.named_parameters())
        self.parameters = sum(one.numel() for one in named.values())
        entries = [((name,), one.shape, wants_decay(name, one.shape)) for name, one in named.items()]
        precision = Precision(torch.bfloat16, torch.float32, optimizer)
        self.record = Record.build(0, "all", Kind.BLOCK, precision, entries)
        self.gradient = torch.zeros(self.record.numel, dtype=torch.bfloat16)
        self.states = self._states(optimizer)
        self.optimizer = ChunkOptimizer(optimizer, tried_kernels(optimizer))

    def _states(self, optimizer: str) -> OptimizerStates:
        count = self.record.numel
        master, high = torch.zeros(count), torch.zeros(count, dtype=torch.bfloat16)
        for name, view in self.record.views(master).items():
            view.copy_(self.model.get_parameter(name).detach())
        low = torch.zeros(count, dtype=torch.int16)
        split(master, high, low)
        for name, view in self.record.views(high).items():
            self.model.get_parameter(name).data = view.float()
        return OptimizerStates.before_training(high, low, optimizer)

    def step(self, batch: torch.Tensor, update: Update) -> float:
        """Take one step; return its loss. Computes in fp32 with weights and gradients rounded to bf16."""
        loss = self.model(input_ids=batch, labels=batch).loss
        loss.backward()
        for name, view in self.record.views(self.gradient).items():
            parameter = self.model.get_parameter(name)
            assert parameter.grad is not None
            view.copy_(parameter.grad)
            parameter.grad = None
        for start, stop, decay in ((0, self.record.decayed, True), (self.record.decayed, self.record.numel, False)):
            part = slice(start, stop)
            self.optimizer.update(self.states.part(part), self.gradient[part], update, decay=decay)
        for name, view in self.record.views(self.states.parameter).items():
            self.model.get_parameter(name).data.copy_(view)
        return float(loss.detach())


@click.command()
@click.argument("optimizers", nargs=-1)
@click.option("--steps", default=300, show_default=True)
@click.option("--hidden", default=128, show_default=True)
@click.option("--layers", default=4, show_default=True)
@click.option("--json", "result", type=click.Path(dir_okay=False, path_type=Path), help="All losses.")
def main(optimizers: tuple[str, ...], steps: int, hidden: int, layers: int, result: Path | None) -> None:
    """Print losses of each optimizer."""
    text = torch.tensor(list("\n\n".join(demo_documents()).encode()), dtype=torch.int64)
    points = [step for step in range(MEAN_OF, steps + 1) if step % max(MEAN_OF, steps // 6) == 0]
    runs: dict[str, list[float]] = {}
    print(f"{describe_machine()}; {len(text):,} bytes of text; mean loss of the {MEAN_OF} steps up to:")
    print(f"{'':16}{'parameters':>12}{'bytes each':>12}" + "".join(f"{step:>9}" for step in points))
    for word in optimizers or ("adamw", "adamw8bit", "lion:3e-4"):
        name, _, rate = word.partition(":")
        run, losses = Run(name, hidden, layers), runs.setdefault(word, [])
        draw = torch.Generator().manual_seed(1)
        for step in range(1, steps + 1):
            starts = torch.randint(len(text) - TOKENS, (ROWS,), generator=draw)
            warm = min(1.0, step / (WARMUP * steps))
            lr = float(rate or LR) * warm * (0.55 + 0.45 * math.cos(math.pi * step / steps))
            update = Update(step, AdamConfig(lr=lr, betas=OPTIMIZERS[name].betas))
            losses.append(run.step(torch.stack([text[start : start + TOKENS] for start in starts]), update))
        means = [statistics.mean(losses[step - MEAN_OF : step]) for step in points]
        each = run.record.precision.state_bytes + run.record.precision.parameter_bytes
        print(f"{word:16}{run.parameters:12,}{each:12.4f}" + "".join(f"{mean:9.4f}" for mean in means), flush=True)
    if result is not None:
        result.write_text(json.dumps(runs))


if __name__ == "__main__":
    main()
