"""A model and a batch to train, and the collectives of a step: each with its ranks and bytes, and how many of these
cross which level.

Notation of PaRO: Psi parameters, Psi' trainable, s micro-batches. All bytes are those of a whole model."""

from dataclasses import dataclass
from math import prod
from typing import Literal

from transformers import PreTrainedConfig

from common.errors import UserError
from common.models.flops import active_parameters, model_flops_per_token, visited_shares
from common.models.meta_model import build_meta_model
from common.models.structure import find_blocks
from common.quantization import BLOCK, quantized_nbytes
from fcdp.grouping import find_units, split_units
from fcdp.strategy.mesh import Mesh
from fcdp.strategy.strategy import BITS, Format, Ring, StrategyMeshes
from fuyou.model.loss.router_loss import find_router_loss

# Bytes that a block's forward pass reads and writes between its products, over those that it saves: with RMS norms,
# rotary embeddings and SwiGLU in PyTorch's operators, and with layer norms and GELU, which are one kernel each. Counted
# for Llama 8B and GPT.
GATED_PASSES = 3.2
PLAIN_PASSES = 1.5


@dataclass(frozen=True)
class Workload:
    """A training step of one rank: ``micro_batches`` times ``micro_batch`` sequences of ``seq_len`` tokens."""

    parameters: float  # number of all parameters, tied ones counted once: Psi
    trainable: float  # number of parameters that have gradients and optimizer states: Psi'
    blocks: int  # number of transformer blocks, which are gathered, reduced and checkpointed one by one
    block_activation_bytes: float = 0.0  # bytes saved for the backward pass per token and block
    hidden_bytes: float = 0.0  # bytes of a block's input per token, which checkpointing keeps
    logits_bytes: float = 0.0  # bytes of the loss per token: logits as they come, in fp32, and their gradient
    forward_flops_per_token: float = 0.0
    weight_flops_per_token: float = 0.0  # FLOPs of the gradients of trainable weights per token
    # FLOPs per token of the forward pass by kind, with attention to earlier tokens only and no embedding.
    dense_flops_per_token: float = 0.0  # of all blocks' products but experts' and attention's
    expert_flops_per_token: float = 0.0
    head_flops_per_token: float = 0.0
    causal_flops_per_token: float = 0.0
    # Bytes per token that all blocks' forward passes read and write between products
    moved_bytes: float = 0.0
    compiled: bool = False  # whether blocks are compiled, which saves most of these
    seq_len: int = 1
    micro_batch: int = 1  # sequences that a rank computes at once
    # what the backward pass gathers no second time: head and final norm, with which it begins
    kept_gathered: float = 0.0
    largest_unit: float = 0.0  # parameters of the largest unit; 0: all are alike
    compute_bytes: float = 2.0  # bytes of one parameter in a gather that is not quantized
    gradient_bytes: float = 2.0  # bytes of one gradient in a reduction that is not quantized
    # Number of micro-batches that accumulate before the optimizer steps: s in PaRO, M in AMSP
    micro_batches: int = 1
    # Whether the loss has a router loss, which is known once all of a batch has gone forward
    router_loss: bool = False
    cache_threshold: float = 0.9  # part of device memory up to which an adaptive cache keeps shards there
    # P, G, and OS take 2, 2, and 12 bytes over their scopes, as the papers count them
    deepspeed_states: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.trainable <= self.parameters:
            raise UserError(
                f"{self.trainable:,.0f} trainable parameters of {self.parameters:,.0f}: it must be more than 0 and at "
                "most all of them."
            )

    @property
    def tokens(self) -> int:
        return self.seq_len * self.micro_batch

    @property
    def router_passes(self) -> int:
        """Forward passes without a backward pass, in which the router loss of several micro-batches is found."""
        return self.micro_batches if self.router_loss and self.micro_batches > 1 else 0

    @property
    def units(self) -> int:
        """Number of units in which parameters are sent: every block, and embedding and head together."""
        return self.blocks + 1

    @property
    def forward_flops(self) -> float:
        return self.tokens * self.forward_flops_per_token

    def backward_flops(self, checkpointing: bool) -> float:
        """Return the FLOPs of a micro-batch's backward pass: gradients of activations and of trainable weights."""
        again = self.forward_flops_per_token if checkpointing else 0.0
        return self.tokens * (self.forward_flops_per_token + self.weight_flops_per_token + again)

    def activation_bytes(self, checkpointing: bool, blocks: int | None = None) -> float:
        """Return the bytes that one micro-batch saves, with attention that keeps no scores; or those that are left when
        its backward pass has ``blocks`` more to do."""
        left = self.blocks if blocks is None else min(blocks, self.blocks)
        block = self.tokens * self.block_activation_bytes
        saved = left * self.tokens * self.hidden_bytes + block if checkpointing else left * block
        return saved + (self.tokens * self.logits_bytes if blocks is None else 0.0)

    @classmethod
    def of_model(
        cls,
        config: PreTrainedConfig,
        *,
        seq_len: int,
        micro_batch: int = 1,
        micro_batches: int = 1,
        trainable_ratio: float = 1.0,
        dtype_bytes: int = 2,
        cache_threshold: float = 0.9,
        router_loss: str = "auto",
    ) -> "Workload":
        """Return the workload of a Hugging Face model that computes and reduces in ``dtype_bytes`` per number."""
        model = build_meta_model(config)
        _, blocks = find_blocks(model)
        parameters = float(sum(parameter.numel() for parameter in model.parameters()))
        active = active_parameters(model, model)
        units = find_units(model)
        sizes = [
            (
                units[group.unit].keep_after_forward,
                float(sum(parameter.numel() for parameter in group.registered())),
            )
            for group in split_units(units, apart=False)
        ]
        attention = (model_flops_per_token(model, seq_len) - 6.0 * active) / 3
        shares = visited_shares(model)
        experts = sum(share * model.get_parameter(name).numel() for name, share in shares.items())
        head = model.get_output_embeddings()
        text = config.get_text_config()
        is_gated = any(name.endswith(("gate_proj", "gate_up_proj")) for name, _ in model.named_modules())
        saved = dtype_bytes / 2 * _block_activation_bytes(text, is_gated)
        return cls(
            parameters=parameters,
            trainable=parameters * trainable_ratio,
            blocks=len(list(blocks.children())),
            block_activation_bytes=saved,
            hidden_bytes=float(dtype_bytes * text.hidden_size),
            logits_bytes=(dtype_bytes + 4.0 + 4.0) * text.vocab_size,
            forward_flops_per_token=2.0 * active + attention,
            # Scores and weighted values have two inputs: their backward is two forwards, for any trainable part.
            weight_flops_per_token=2.0 * active * trainable_ratio + attention,
            dense_flops_per_token=2.0 * (active_parameters(model, blocks) - experts),
            expert_flops_per_token=2.0 * experts,
            head_flops_per_token=0.0 if head is None else 2.0 * head.weight.numel(),
            causal_flops_per_token=attention / 2,
            moved_bytes=len(list(blocks.children())) * (GATED_PASSES if is_gated else PLAIN_PASSES) * saved,
            seq_len=seq_len,
            micro_batch=micro_batch,
            kept_gathered=sum(size for is_kept, size in sizes if is_kept),
            largest_unit=max(size for _, size in sizes),
            compute_bytes=float(dtype_bytes),
            gradient_bytes=float(dtype_bytes),
            micro_batches=micro_batches,
            router_loss=find_router_loss(model, router_loss) is not None,
            cache_threshold=cache_threshold,
        )


def _block_activation_bytes(config: PreTrainedConfig, gated: bool) -> float:
    """Return the bytes per token that one block saves in bf16 (Korthikanti et al., arXiv:2205.05198, section 4.1),
    without dropout masks, in the model's sizes."""
    hidden = config.hidden_size
    heads = config.num_attention_heads
    head = getattr(config, "head_dim", None) or hidden // heads
    keys = (getattr(config, "num_key_value_heads", None) or heads) * head
    inner = getattr(config, "intermediate_size", None) or getattr(config, "n_inner", None) or 4 * hidden
    norms = 2 * hidden
    rows = hidden
    if (visited := getattr(config, "num_experts_per_tok", None)) is not None:
        # A copy of each token for every expert
        inner = visited * (getattr(config, "moe_intermediate_size", None) or inner)
        rows += 2 * visited * hidden
    mlp = rows + (4 if gated else 2) * inner
    attention = hidden + heads * head + 2 * keys + heads * head
    return 2.0 * (norms + attention + mlp)


# A broadcast: every rank in turn sends its part to all, with an all-gather's result.
Operation = Literal["all_gather", "reduce_scatter", "all_reduce", "broadcast"]
# In every forward, in every backward, after the last backward, before the next forward, or in a forward for the router.
Phase = Literal["forward", "backward", "reduce", "spread", "route"]


def element_bytes(format: Format, plain: float) -> float:
    """Return the bytes of one element in ``format``, scales included; ``plain`` where it is not quantized."""
    return plain if format == "bf16" else quantized_nbytes(BLOCK, BITS[format]) / BLOCK


@dataclass(frozen=True)
class Collective:
    """One kind of collective of a step. Every rank of the cluster is in one group of it."""

    purpose: str  # description for people: ``gather P, forward``
    operation: Operation
    mesh: Mesh  # ranks of the group by level
    # Of the whole buffer, of all units together: the result of a gather, the input of a reduction
    nbytes: float
    times: int  # number of runs per step
    phase: Phase
    ring: Ring

    def sent_by_rank(self) -> tuple[float, ...]:
        """Return the bytes that a rank sends per step, on average over ranks, by level of the link."""
        passes = 2 if self.operation == "all_reduce" else 1
        return tuple(self.times * passes * part * self.nbytes for part in ring_parts(self.mesh, self.ring))


def ring_parts(mesh: Mesh, ring: Ring) -> tuple[float, ...]:
    """Return the part of the buffer that a rank sends over links of each level in an all-gather or a reduce-scatter.

    Level after level (``hierarchical``, ``ho``), each of e ranks sends (e-1)/e of 1/(product of the faster levels). In
    a flat ring of E ranks each sends (E-1)/E to the next one, which for one in each group is beyond that level."""
    extents = mesh.extents
    if ring == "flat":
        shards = mesh.shards
        outermost = max((level for level, extent in enumerate(extents) if extent > 1), default=0)
        parts = []
        for level, extent in enumerate(extents):
            # The ring closes over the outermost level: all of its links are used, of faster levels all but the last.
            crossing = 1.0 if level == outermost else (extent - 1) / extent
            reached = crossing / prod(extents[:level]) if level <= outermost else 0.0
            parts.append(reached * (shards - 1) / shards)
        return tuple(parts)
    return tuple((extent - 1) / extent / prod(extents[:level]) for level, extent in enumerate(extents))


def step_collectives(layout: StrategyMeshes, workload: Workload) -> list[Collective]:
    """Return all collectives of one step that move anything.

    G is reduce-scattered over the scope of OS and all-reduced over its replicas, and P gathered."""
    strategy = layout.strategy
    p = layout.p
    g = layout.g
    os = layout.os
    world = layout.levels.whole
    s = workload.micro_batches
    psi = workload.parameters
    trained = workload.trainable
    compute = workload.compute_bytes
    gradient = workload.gradient_bytes
    gather = element_bytes(strategy.precision.gather, compute)
    reduce = element_bytes(strategy.precision.reduce, gradient)
    again = psi - workload.kept_gathered  # what is gathered in the backward pass, too
    ring = strategy.ring
    collectives: list[Collective] = []

    def add(
        purpose: str,
        operation: Operation,
        mesh: Mesh,
        nbytes: float,
        times: int,
        phase: Phase,
        ring: Ring = ring,
    ) -> None:
        if mesh.shards > 1 and times:
            collectives.append(Collective(purpose, operation, mesh, nbytes, times, phase, ring))

    add("gather P, forward", "all_gather", p, gather * psi, s, "forward")
    add("gather P, router loss", "all_gather", p, gather * again, workload.router_passes, "route")
    if layout.secondary is None:
        add("gather P, backward", "all_gather", p, gather * again, s, "backward")
    else:
        secondary = element_bytes(strategy.precision.secondary, compute)
        add(
            "gather second shards, backward", "all_gather", layout.secondary, secondary * again, s, "backward"
        )

    # What is quantized goes in one hop inside the node, and one beyond it: a ring would quantize it at every step.
    hops: Ring = ring if strategy.precision.reduce == "bf16" else "hierarchical"
    add("reduce G", "reduce_scatter", g, reduce * trained, s, "backward", hops)
    add("reduce G to OS", "reduce_scatter", os.over(g), gradient * trained / g.shards, 1, "reduce")
    add("reduce G over replicas", "all_reduce", world.over(os), gradient * trained / os.shards, 1, "reduce")
    add("spread new P", "all_gather", os.over(p), compute * trained / p.shards, 1, "spread")
    return collectives


def bytes_per_node(collectives: list[Collective], layout: StrategyMeshes) -> tuple[float, float]:
    """Return the bytes that one node's ranks send per step: to other nodes, and to each other."""
    sent = [collective.sent_by_rank() for collective in collectives]
    ranks = layout.levels.ranks_per_node
    return ranks * sum(parts[-1] for parts in sent), ranks * sum(sum(parts[:-1]) for parts in sent)
