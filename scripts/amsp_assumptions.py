"""Which assumption decides between AMSP's choice (table IV) and our planner's, on 128 nodes with 8 A800.

    python scripts/amsp_assumptions.py

LLaMA-7B and 13B, 2,048 sequences of 2,048 tokens per step. One assumption is changed at a time. AMSP's choice counts as
reached where its step is planned within 1 % of the fastest one: less than a model of times can tell. Where an
assumption is a number, the value nearest to ours at which that happens is looked for. Last, what AMSP's split of the
backward pass could gain. Pure computing, a minute.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

from reproduce_strategies import AMSP_TABLE_IV, amsp_space, table

from common.models.presets import load_config
from fcdp.planner import Cluster, Workload, admissible, estimate, load_cluster, plan
from fcdp.planner.estimate import _Step
from fcdp.planner.rates import AlphaBeta
from fcdp.planner.search import SAME
from fcdp.strategy.mesh import Levels
from fcdp.strategy.names import parse_strategy
from fcdp.strategy.strategy import Strategy

LEVELS = Levels((8, 128))
CLUSTER = load_cluster("a800-hdr").resized(LEVELS)
STRATEGIES = [strategy for strategy in admissible(LEVELS) if strategy.precision.exact]
MODELS = ("llama-7b", "llama-13b")
REFINEMENTS = 8


@dataclass(frozen=True)
class Case:
    """One model, planned under one set of assumptions."""

    model: str
    workload: Workload
    cluster: Cluster = CLUSTER
    strategies: Sequence[Strategy] = tuple(STRATEGIES)

    @classmethod
    def of(cls, model: str) -> "Case":
        """The model with the planner's own assumptions: two micro-batches of one sequence on each GPU."""
        return cls(model, Workload.of_model(load_config(model)[0], seq_len=2048, micro_batches=2))

    def gap(self, **options: Any) -> tuple[float, str]:
        """How much longer a step takes with AMSP's choice than with the fastest, and that one's name; infinite if it
        does not fit."""
        theirs = parse_strategy(AMSP_TABLE_IV[self.model][0])
        paper = plan(self.workload, self.cluster, strategies=[theirs, replace(theirs, ring="flat")], **options).choice
        best = plan(self.workload, self.cluster, strategies=self.strategies, **options).choice
        if paper is None or best is None:
            return math.inf, "-" if best is None else best.name
        fastest = min(best.step_seconds, paper.step_seconds)
        return paper.step_seconds / fastest - 1, best.layout.strategy.scopes

    def on_node_alone(self) -> "Case":
        """The same, with strategies only that fit on one node: their optimizer states stay inside."""
        return replace(self, strategies=[one for one in self.strategies if one.os.on(LEVELS).nodes == 1])

    def linked(self, latency: float = 1.0, bandwidth: float = 1.0) -> "Case":
        """The same, with so many times the latency and the bandwidth across nodes."""
        rates = CLUSTER.rates
        assert isinstance(rates, AlphaBeta)
        *inside, beyond = rates.links
        changed = replace(
            beyond,
            latency_seconds=beyond.latency_seconds * latency,
            bytes_per_second=beyond.bytes_per_second * bandwidth,
        )
        return replace(self, cluster=replace(CLUSTER, rates=replace(rates, links=(*inside, changed))))

    def reaching(self, efficiency: float) -> "Case":
        """The same, with GPUs that reach this part of their FLOP/s."""
        flops = CLUSTER.flops_per_second / 0.67 * efficiency
        return replace(self, cluster=replace(CLUSTER, flops_per_second=flops))

    def with_memory(self, gigabytes: float) -> "Case":
        """The same, with GPUs of this memory."""
        return replace(self, cluster=replace(CLUSTER, device_memory_bytes=int(gigabytes * 1e9)))


def flips_at(gap: Callable[[float], float], ours: float, grid: Iterable[float]) -> float | None:
    """The value nearest to ``ours`` at which AMSP's choice is within :data:`SAME`, looked for along ``grid``, which
    leads away from it; None: at none."""
    if gap(ours) <= SAME:
        return ours
    before = ours
    for value in grid:
        if gap(value) <= SAME:
            away, reached = before, value
            for _ in range(REFINEMENTS):
                middle = math.sqrt(away * reached)
                away, reached = (away, middle) if gap(middle) <= SAME else (middle, reached)
            return reached
        before = value
    return None


def fixed(case: Case) -> list[tuple[str, tuple[float, str]]]:
    """Assumptions that are taken or not, with the gap under each."""
    flat = replace(case, strategies=amsp_space(LEVELS))
    no_ho = replace(case, strategies=[one for one in case.strategies if one.ring != "ho"])
    return [
        ("as planned", case.gap()),
        ("no HO-Ring", no_ho.gap()),
        ("new P is spread before the forward, not beside it", case.gap(overlap_spread=False)),
        ("nothing overlaps", replace(case, cluster=replace(CLUSTER, overlaps=False)).gap()),
        ("blocks are always recomputed", case.gap(checkpointing=True)),
        ("flat rings, G as P or OS", flat.gap()),
        ("the same, all-reduces and broadcasts (IV-C)", flat.gap(select_and_drop=True)),
        ("must fit on 8 GPUs (VI-A4)", case.on_node_alone().gap()),
        ("the same, GPUs of 70 GB", case.on_node_alone().with_memory(70).gap(checkpointing=False)),
        ("must fit on 8 GPUs, sequences of 4,096, IV-C", _as_in_the_paper(flat)),
    ]


def _as_in_the_paper(flat: Case) -> tuple[float, str]:
    """The gap with AMSP's sequences and formulas, among what fits on one node."""
    workload = Workload.of_model(load_config(flat.model)[0], seq_len=4096, micro_batches=1)
    case = replace(flat, workload=replace(workload, sum_bytes=2)).on_node_alone()
    return case.gap(select_and_drop=True, checkpointing=False)


def searched(case: Case) -> list[tuple[str, str, float | None]]:
    """Assumptions that are numbers: their value with us, and the one at which AMSP's choice is reached."""

    def batches(count: float) -> float:
        return replace(case, workload=replace(case.workload, micro_batches=round(count))).gap()[0]

    def memory(gigabytes: float) -> float:
        return case.on_node_alone().with_memory(gigabytes).gap(checkpointing=False)[0]

    doubled = [2.0**step for step in range(1, 9)]
    return [
        (
            "latency across nodes",
            "9.6 us",
            _times(9.6, flips_at(lambda by: case.linked(latency=by).gap()[0], 1, doubled)),
        ),
        (
            "bandwidth across nodes, more",
            "78 GB/s",
            _times(78, flips_at(lambda by: case.linked(bandwidth=by).gap()[0], 1, doubled)),
        ),
        (
            "bandwidth across nodes, less",
            "78 GB/s",
            _times(78, flips_at(lambda by: case.linked(bandwidth=1 / by).gap()[0], 1, doubled), invert=True),
        ),
        (
            "part of FLOP/s reached",
            "0.67",
            flips_at(lambda part: case.reaching(part).gap()[0], 0.67, (0.6, 0.5, 0.4, 0.3, 0.2, 0.1)),
        ),
        ("micro-batches per step", "2", flips_at(batches, 2, [4.0, 8.0, 16.0, 32.0, 64.0, 128.0])),
        ("GB of a GPU, must fit on 8", "80", flips_at(memory, 80, range(79, 50, -1))),
    ]


def split_gradients() -> list[tuple[str, ...]]:
    """What splitting the gradients of weights and of inputs (V-C1) can bring at most: a step in which no gather and no
    reduction sticks out at either end of a pass, beside one in which those of one unit do."""
    rows = []
    for model, (theirs, smallest, recomputes) in AMSP_TABLE_IV.items():
        for gpus in sorted({smallest, 64, 1024}):
            levels = Levels((8, gpus // 8))
            cluster = load_cluster("a800-hdr").resized(levels)
            workload = Workload.of_model(load_config(model)[0], seq_len=4096, micro_batches=1024 // gpus)
            cells = []
            for name in (theirs, "zero3", "fcdp"):
                layout = parse_strategy(name).on(levels)
                plain = estimate(layout, workload, cluster, checkpointing=recomputes).step_seconds
                with mock.patch.object(_Step, "_pass", lambda step, *both: max(*both, step.copies)):
                    split = estimate(layout, workload, cluster, checkpointing=recomputes).step_seconds
                cells.append(f"{1 - split / plain:.1%}")
            rows.append((model, str(gpus), theirs, *cells))
    return rows


def _times(ours: float, by: float | None, *, invert: bool = False) -> float | None:
    return None if by is None else ours / by if invert else ours * by


def main() -> None:
    """Print both tables."""
    cases = [Case.of(model) for model in MODELS]
    taken = zip(*map(fixed, cases), strict=True)
    rows = [(both[0][0], *(f"{gap:.1%} ({name})" for _, (gap, name) in both)) for both in taken]
    print(table(("assumption", *(f"{model}: slower than the fastest (P/G/OS)" for model in MODELS)), rows))
    print()
    found = zip(*map(searched, cases), strict=True)
    numbers = [
        (both[0][0], both[0][1], *("never" if at is None else f"{at:.3g}" for _, _, at in both)) for both in found
    ]
    print(table(("number", "ours", *(f"{model}: theirs from" for model in MODELS)), numbers))
    print("\nSplit of weight and input gradients: at most so much less of a step\n")
    print(table(("model", "GPUs", "theirs", "theirs gains", "zero3 gains", "fcdp gains"), split_gradients()))


if __name__ == "__main__":
    main()
