"""What ranks do in the tests of two dimensions: a Llama that is tensor-parallel and sharded, as torchtitan's is.

Embedding, attention, feed-forward and head are split over the ranks of one dimension; between them, where every rank
would compute the same, the sequence is. FSDP2, its own or ours, shards all of that over the other dimension.
"""

from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
import transformers
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as fsdp2_fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import fcdp
from tests.helpers.fcdp.cases import digest
from tests.helpers.fcdp.module_cases import adam, shard
from tests.helpers.fcdp.twin import InOrder

VOCABULARY, TOKENS, STEPS = 96, 48, 3


@dataclass(frozen=True)
class TwoDimensions:
    """A run of :data:`STEPS` steps of AdamW."""

    tp_outside: bool = False
    """Whether tensor parallelism goes from node to node and sharding stays inside nodes, not the other way round."""
    micro_batches: int = 1
    accumulate: bool = False
    """Whether gradients stay whole until the last micro-batch (``set_requires_gradient_sync``), else reduced each."""
    strategy: str = "fcdp"


@dataclass(frozen=True)
class Outcome:
    """What one rank has seen."""

    losses: list[float]
    """Of every micro-batch."""
    digest: str
    """Of every bit of all parameters, put together from all ranks."""
    weights: dict[str, torch.Tensor]
    """On rank 0."""
    layout: tuple[int, int] = (0, 0)
    """Nodes and ranks in each that ours has found on the dimension that it shards over."""
    sent: int = 0
    """Bytes that this rank's gathers and reductions have sent to other nodes."""
    formula: float = 0.0
    """What the ranks of a node that share its shards should send together, if gradients leave a node once a step."""


def make_llama() -> nn.Module:
    """Return a Llama of two blocks, the same on every rank; heads, widths and tokens can be halved."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=40, intermediate_size=68, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=10, attn_implementation="sdpa", use_cache=False,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).train()


def split_tensors(model: Any, mesh: DeviceMesh) -> None:
    """Make ``model`` tensor-parallel over ``mesh``, with the sequence split wherever nothing else is."""
    parallelize_module(
        model,
        mesh,
        {
            "model.embed_tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "model.norm": SequenceParallel(),
            "lm_head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
        },
    )
    whole = {"hidden_states": Shard(1)}, {"hidden_states": Replicate()}
    plan = {
        "input_layernorm": SequenceParallel(),
        "self_attn": PrepareModuleInput(input_kwarg_layouts=whole[0], desired_input_kwarg_layouts=whole[1]),
        "self_attn.q_proj": ColwiseParallel(), "self_attn.k_proj": ColwiseParallel(),
        "self_attn.v_proj": ColwiseParallel(), "self_attn.o_proj": RowwiseParallel(output_layouts=Shard(1)),
        "post_attention_layernorm": SequenceParallel(),
        "mlp": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
        "mlp.gate_proj": ColwiseParallel(), "mlp.up_proj": ColwiseParallel(),
        "mlp.down_proj": RowwiseParallel(output_layouts=Shard(1)),
    }  # fmt: skip
    for block in model.model.layers:
        parallelize_module(block, mesh, plan)


def train(topology: fcdp.Topology, run: TwoDimensions, ours: bool) -> Outcome:
    """Train by FSDP2's ``fully_shard`` or by ours, on two ranks of tensor parallelism."""
    world = dist.get_world_size()
    shape, names = ((2, world // 2), ("tp", "dp")) if run.tp_outside else ((world // 2, 2), ("dp", "tp"))
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    dp = mesh["dp"]
    model: Any = make_llama()
    split_tensors(model, mesh["tp"])
    options = {"strategy": run.strategy} if ours else {}
    shard(model, fcdp.fully_shard if ours else fsdp2_fully_shard, dp, MixedPrecisionPolicy(), **options)
    if not ours and dp.size() > 2:
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_custom_reduce_scatter(InOrder(2, dp.size() // 2))
    losses = _steps(model, run, [dp.get_local_rank()])
    whole = _whole(model)
    weights = {} if dist.get_rank() else whole
    if not ours:
        return Outcome(losses, digest(model), weights)
    sharding = fcdp.sharding(model)
    found = sharding.topology
    # Shares of parameters stay where they are between them
    reduced = 1 if run.accumulate else run.micro_batches
    formula = sum(sharding.inter_node_bytes(reduced, first_step=not step) for step in range(STEPS))
    layout = found.nodes, found.ranks_per_node
    return Outcome(losses, digest(model), weights, layout, sharding.traffic.inter_node, formula)


def train_alone(run: TwoDimensions, shares: int) -> Outcome:
    """Train the same model in this process, which holds all of it, with the batches of ``shares`` ranks one by one."""
    model = make_llama()
    losses = _steps(model, run, list(range(shares)))
    return Outcome(losses, "", {name: value.detach().clone() for name, value in model.named_parameters()})


def _steps(model: Any, run: TwoDimensions, shares: list[int]) -> list[float]:
    """Take all steps with these shares of the batch, and return the losses, share by share."""
    optimizer, losses = adam(model), []
    # The model would take the number of tokens from the embeddings, of which a rank has half.
    positions = torch.arange(TOKENS).unsqueeze(0)
    mask = (positions.unsqueeze(-1) >= positions.unsqueeze(-2)).unsqueeze(1)
    for step in range(STEPS):
        for index in range(run.micro_batches):
            if run.accumulate and isinstance(model, FSDPModule):
                model.set_requires_gradient_sync(index == run.micro_batches - 1)
            for share in shares:
                seed = 1000 * step + 10 * index + share
                ids = torch.randint(0, VOCABULARY, (2, TOKENS), generator=torch.Generator().manual_seed(seed))
                loss = model(ids, mask, positions, labels=ids).loss / run.micro_batches
                (loss / len(shares)).backward()
                losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def _whole(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return every parameter whole. Collective."""
    return {name: cast(Any, value).full_tensor().detach().clone() for name, value in model.named_parameters()}
