"""What ranks do in the tests of strategies: one small model trained with many strategies, by the same processes."""

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

import fcdp
from fcdp.strategy.mesh import Levels
from fcdp.strategy.strategy import Routes, parse_strategy
from tests.helpers.fcdp.recorder import Launch, recorded
from tests.helpers.fcdp.twin import InOrder, Plain

IDS = 11


class Toy(nn.Module):
    """An embedding, a block and a head; sizes are multiples of nothing. ``adapters``: all else is frozen.
    ``frozen``: this many blocks before the last, and the embedding, are."""

    def __init__(self, adapters: bool = False, frozen: int = 0):
        super().__init__()
        torch.manual_seed(3)
        self.embedding = nn.Embedding(IDS, 7)
        self.blocks = nn.ModuleList(Block(adapters) for _ in range(1 + frozen))
        self.head = nn.Linear(7, IDS)
        if adapters:
            for name, parameter in self.named_parameters():
                parameter.requires_grad_("adapter" in name)
        if frozen:
            self.embedding.requires_grad_(False)
            self.blocks[:frozen].requires_grad_(False)

    def get_input_embeddings(self) -> nn.Module:
        return self.embedding

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        data = self.embedding(ids)
        for block in self.blocks:
            data = block(data)
        return nn.functional.cross_entropy(self.head(data).flatten(0, 1), ids.roll(1, 1).flatten())


class Block(nn.Module):
    def __init__(self, adapter: bool):
        super().__init__()
        self.wide, self.narrow = nn.Linear(7, 13), nn.Linear(13, 7)
        self.adapter = nn.Linear(7, 7) if adapter else None

    def forward(self, data: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = data + self.narrow(torch.tanh(self.wide(data)))
        return result if self.adapter is None else result + self.adapter(data)


@dataclass(frozen=True)
class Run:
    """Five steps. AdamW updates the blocks and SGD the rest, so one run shows both."""

    micro_batches: tuple[int, ...] = (1, 3, 1, 2, 1)
    """Of each step."""
    adapters: bool = False
    """Whether only adapters are trained."""
    frozen: int = 0
    """Blocks before the one that is trained; the embedding is frozen, too."""


@dataclass(frozen=True)
class Trained:
    losses: list[float]
    weights: dict[str, torch.Tensor]
    sent: list[int]
    """Bytes that this rank sent across nodes, by step."""
    formula: list[float]
    """What its node should send."""
    replicas: int
    launches: list[Launch] = field(default_factory=list)
    """Collectives of the run, in order."""


def train(topology: fcdp.Topology, strategy: str, run: Run) -> Trained:
    """Train one model with one strategy; ``fsdp2`` is plain FSDP2."""
    model: Any = Toy(run.adapters, run.frozen)
    sharding: Any
    twins = []
    if strategy == "fsdp2":
        sharding = Plain(model, topology, strategy, MixedPrecisionPolicy())
        for group in sharding.groups:
            twins.append(InOrder(topology.nodes, topology.ranks_per_node))
            group.holder.set_custom_reduce_scatter(twins[-1])
    else:
        model = fcdp.fully_shard(model, topology, strategy)
        sharding = fcdp.sharding(model)
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    blocks = [parameter for name, parameter in trained.items() if name.startswith("blocks")]
    others = [parameter for name, parameter in trained.items() if not name.startswith("blocks")]
    optimizers: list[torch.optim.Optimizer] = [torch.optim.AdamW(blocks, lr=1e-2)]
    if others:
        optimizers.append(torch.optim.SGD(others, lr=0.3))
    generator = torch.Generator().manual_seed(100 + topology.rank)
    losses, sent = [], []
    for count in run.micro_batches:
        before = 0 if twins else sharding.traffic.inter_node
        for index in range(count):
            is_last = index == count - 1
            sharding.set_is_last_micro_batch(is_last)
            for twin in twins:
                twin.is_last = is_last
            loss = model(torch.randint(0, IDS, (2, 5), generator=generator)) / count
            loss.backward()
            losses.append(loss.item())
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        sent.append(0 if twins else sharding.traffic.inter_node - before)
    weights = {name: whole(parameter) for name, parameter in model.named_parameters()}
    formula = []
    if not twins:
        formula = [
            sharding.inter_node_bytes(count, first_step=not step)
            for step, count in enumerate(run.micro_batches)
        ]
    sharding.close()
    dist.barrier()
    return Trained(losses, weights, sent, formula, 1 if twins else sharding.routes.replicas)


def whole(parameter: nn.Parameter) -> torch.Tensor:
    value: Any = parameter.detach()
    return value.full_tensor().clone() if hasattr(value, "full_tensor") else value.clone()


def train_under_switches(
    topology: fcdp.Topology, strategies: list[str], run: Run
) -> tuple[dict[str, Trained], dict[str, list[list[int]]]]:
    """Train with two nodes under each leaf switch. By strategy also the ranks of its gathers, slowest axis first."""
    levels = Levels(topology.levels.sizes, nodes_per_switch=2)
    there = fcdp.Topology(topology.nodes, topology.ranks_per_node, levels=levels)
    axes = {
        name: [axis.line(there.rank) for axis in Routes.of(parse_strategy(name).on(levels)).gather[::-1]]
        for name in strategies[1:]
    }
    found = train_all(there, strategies, run)
    there.close()
    return found, axes


def train_all(topology: fcdp.Topology, strategies: list[str], run: Run) -> dict[str, Trained]:
    """By strategy; weights by rank 0 only."""
    found = {}
    for strategy in strategies:
        with recorded() as launches:
            found[strategy] = train(topology, strategy, run)
        found[strategy].launches.extend(launches)
    if topology.rank:
        for trained in found.values():
            trained.weights.clear()
    return found
