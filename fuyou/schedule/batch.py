"""A batch as the engine runs it, and the inputs of its loss."""

from dataclasses import dataclass

from fuyou.layout.model_layout import REFERENCE_PHASES, Phase, Visit


@dataclass(frozen=True)
class LossInputs:
    """Inputs of a loss that the caller computes."""

    # Fp32 numbers that the head makes for each token; 0: the loss is the engine's own cross entropy
    outputs: int = 0
    reference: bool = False  # Whether every sequence also passes through the model without its adapters

    @property
    def passes(self) -> int:
        """Return how often each sequence passes forward."""
        return 2 if self.reference else 1


ENGINE_LOSS = LossInputs()  # The engine's own loss


@dataclass(frozen=True)
class Batch:
    """A batch as the engine runs it."""

    rows: int  # Sequences in the batch
    seq_len: int
    micro_rows: int  # Sequences in one micro-batch; the last one may have fewer
    loss: LossInputs = ENGINE_LOSS  # What the loss is computed from
    most_together: int | None = None  # Micro-batches together in a block in pieces; None for all
    chunk: int | None = None  # Tokens of a row that pass at once; None for all. A micro-batch is a chunk then

    @property
    def together(self) -> int:
        """Return how many micro-batches go through a block in pieces together in a forward pass."""
        return min(self.most_together or self.micro_batches, self.micro_batches)

    def passes_in_pieces(self, trained: bool) -> int:
        """Return how often all pieces of a block come to the device in a step.

        Args:
            trained: whether pieces are trained, so that all micro-batches go through the backward pass together.
        """
        return -(-self.micro_batches // self.together) + (1 if trained else self.micro_batches)

    @property
    def micro_batches(self) -> int:
        return -(-self.rows // self.micro_rows) * self.chunks

    @property
    def chunks(self) -> int:
        """Return the chunks of a row; 1 if rows pass whole."""
        return -(-self.seq_len // (self.chunk or self.seq_len))

    @property
    def columns(self) -> int:
        """Return the tokens of each row in a micro-batch."""
        return min(self.chunk or self.seq_len, self.seq_len)

    def activations(self, layers: int) -> int:
        """Return how many blocks' inputs exist at once, at most; a reference's stay until the next block only."""
        reference = self.micro_batches + 1 if self.loss.reference else 0
        return (layers + 2) * self.micro_batches + 2 + reference

    @property
    def micro_tokens(self) -> int:
        return self.micro_rows * self.columns

    @property
    def mean_tokens(self) -> float:
        return self.rows * self.seq_len / self.micro_batches


@dataclass(frozen=True)
class BatchShape:
    """Sizes of a batch that a schedule depends on."""

    micro_batches: int  # Number of micro-batches that the batch is split into
    activation_bytes: int  # Bytes of a block's input, for one micro-batch
    tokens: float  # Tokens in one micro-batch, on average
    # Bytes of the activations that one block saves besides its input, for one micro-batch
    saved_bytes: int = 0
    own_loss: bool = False  # Whether the caller computes the loss, between two runs of the head
    reference: bool = False  # Whether micro-batches also pass without adapters, as a reference
    # Micro-batches that go through a block in pieces together in a forward pass; None: all
    together: int | None = None
    chunks: int = 1  # Chunks that each row passes in: micro-batches are chunks of one row, then of the next
    # FLOPs in which each chunk attends to those before it, in a block's forward and backward pass; empty: not counted
    chunk_flops: tuple[tuple[float, float], ...] = ()

    def micro_batches_of(self, visit: Visit) -> range:
        """Return the numbers of a visit's micro-batches; those of the reference come last."""
        micros = visit.micro_batches(
            self.micro_batches * (2 if self.reference and visit.phase in REFERENCE_PHASES else 1)
        )
        return micros[::-1] if self.chunks > 1 and visit.phase is Phase.BLOCK_BACKWARD else micros

    def attention_flops(self, phase: Phase, micro: int) -> float:
        """Return the FLOPs in which a chunk attends to those before it."""
        if phase not in (Phase.BLOCK_FORWARD, Phase.BLOCK_BACKWARD) or not self.chunk_flops:
            return 0.0
        forward, backward = self.chunk_flops[micro % self.chunks]
        return forward if phase is Phase.BLOCK_FORWARD else backward

    def is_reference(self, micro: int | None) -> bool:
        return micro is not None and micro >= self.micro_batches
