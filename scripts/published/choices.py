"""What our planner chooses on every testbed, for our own engine, next to the paper's winner."""

from dataclasses import dataclass

from fcdp.planner import Cluster, Estimate, StrategyPlan, Workload, load_cluster, plan
from fcdp.strategy.mesh import Levels
from fcdp.strategy.strategy import Strategy, parse_strategy
from published.cases import LORA, workload_of

COMPARED = {
    "AMSP": ["zero1", "zero3", "mics", "zero++-exact"],
    "PaRO": ["zero2", "zero3", "mics", "zero++-exact", "paro-igg", "paro-iig", "paro-nig"],
    "FCDP": ["zero3", "zero++-exact", "fcdp"],
    "ZeRO-topo": ["zero3", "zero++", "zero-topo"],
}


CLEARLY = 0.05  # planned gain that counts: about the planner's own median error


@dataclass(frozen=True)
class Testbed:
    """A paper's experiment and the strategy that won it."""

    paper: str
    case: str
    winner: str
    cluster: Cluster
    workload: Workload
    checkpointing: bool | None = None


def all_testbeds() -> list[Testbed]:
    """Every experiment with a winner."""
    a800 = load_cluster("a800-hdr")
    a100 = load_cluster("a100-ib")
    a40, ethernet = load_cluster("a40-edr"), load_cluster("a40-1gbe").resized(Levels((2, 4, 2)))
    paro = {"micro_batch": 4, "micro_batches": 10}
    return [
        Testbed("AMSP", "LLaMA-7B, 1024 GPUs", "amsp-7b", a800, workload_of("llama-7b", 4096)),
        Testbed("AMSP", "LLaMA-13B, 1024 GPUs", "amsp-13b", a800, workload_of("llama-13b", 4096)),
        Testbed("AMSP", "LLaMA-30B, 1024 GPUs", "amsp-30b", a800, workload_of("llama-30b", 4096), True),
        Testbed("PaRO", "LLaMA-7B, 128 GPUs", "paro-nig", a100, workload_of("llama-7b", 512, **paro)),
        Testbed("PaRO", "LLaMA-65B, 128 GPUs", "paro-iig", a100, workload_of("llama-65b", 512, **paro), True),
        Testbed("FCDP", "GPT-10B, 32 GPUs, RDMA", "fcdp", a40, workload_of("gpt-10b", 256, micro_batch=8)),
        Testbed(
            "FCDP", "GPT-10B with LoRA, 16 GPUs, 1 Gbit/s", "fcdp", ethernet,
            workload_of("gpt-10b", 256, micro_batch=8, trainable=LORA),
        ),
        Testbed(
            "ZeRO-topo", "GPT-NeoX-20B, 384 GCDs", "zero-topo", load_cluster("frontier"),
            workload_of("gpt-neox-20b", 2048, micro_batches=4), True,
        ),
    ]  # fmt: skip


def changes(choice: Estimate, other: Estimate) -> str:
    """Return which collectives take longer or shorter than those of another strategy, hidden or not."""
    seconds = {"gather": [0.0, 0.0], "reduce": [0.0, 0.0], "spread": [0.0, 0.0]}
    for index, planned in enumerate((other, choice)):
        for collective, taken in zip(planned.collectives, planned.seconds, strict=True):
            seconds[collective.purpose.split()[0]][index] += taken
    names = {"gather": "gathers", "reduce": "reductions", "spread": "new parameters"}
    changed = [(after - before, names[key], before, after) for key, (before, after) in seconds.items()]
    texts = [
        f"{name} {before:.2f} -> {after:.2f} s"
        for change, name, before, after in sorted(changed)
        if abs(change) > 0.005
    ]
    return ", ".join(texts)


@dataclass(frozen=True)
class Choice:
    """What the planner chooses on a testbed."""

    compared: str  # of the systems that the paper compares
    best: Estimate  # of all strategies
    winner: Estimate  # the paper's winner, in our engine

    @property
    def gain(self) -> float:
        """Throughput of the choice over the winner's, less one."""
        return self.winner.step_seconds / self.best.step_seconds - 1

    @property
    def reason(self) -> str:
        """What the choice spends more or less on than the winner."""
        return "the same" if self.best.name == self.winner.name else changes(self.best, self.winner)

    @property
    def verdict(self) -> str:
        """Whether it is the paper's winner, or clearly faster; else the two tie within the planner's own error."""
        return "winner" if self.best.name == self.winner.name else "faster" if self.gain >= CLEARLY else "tie"


def choice_of(testbed: Testbed) -> Choice:
    """Return the planner's choices; strategies that quantize only where the winner does."""
    quantized = not parse_strategy(testbed.winner).precision.exact
    names = dict.fromkeys([testbed.winner, *COMPARED[testbed.paper]])

    def chosen(strategies: list[Strategy] | None) -> StrategyPlan:
        return plan(
            testbed.workload,
            testbed.cluster,
            strategies=strategies,
            allow_quantized=quantized,
            checkpointing=testbed.checkpointing,
        )

    compared = chosen([parse_strategy(name) for name in names])
    best = chosen(None).choice
    if compared.choice is None or best is None:
        raise SystemExit(f"{testbed.case}: nothing fits")
    winner = next(planned for planned in compared.estimates if planned.name == testbed.winner)
    return Choice(compared.choice.name, best, winner)
