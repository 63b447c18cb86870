"""Tasks, of which a step is made: each on one resource, each waiting for others."""

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from fuyou.layout.model_layout import (
    FORWARD_PHASES,
    REFERENCE_PHASES,
    ModelLayout,
    Phase,
    Recomputation,
    Visit,
)
from fuyou.layout.record import Kind


class Resource(Enum):
    """What a task keeps busy. The largest sum over one of them bounds the step."""

    GPU = "gpu"
    HOST_TO_DEVICE = "host_to_device"
    DEVICE_TO_HOST = "device_to_host"
    SSD = "ssd"
    ADAM = "adam"
    INTRA_NODE = "intra_node"  # What connects the ranks of a node
    INTER_NODE = "inter_node"  # The network between nodes
    NONE = "none"

    # There is one object for each member; Enum's own hash runs in Python, millions of times
    __hash__ = object.__hash__


class Op(Enum):
    """Kinds of task. Each kind runs first in, first out, in its lane; several lanes share a resource."""

    PARAMETER_READ = ("parameter read", Resource.SSD)  # SSD -> host
    # SSD -> device, past the host's memory
    PARAMETER_READ_DEVICE = ("parameter read to the device", Resource.SSD)
    PARAMETER_UPLOAD = ("parameter upload", Resource.HOST_TO_DEVICE)
    # From the ranks of the node, each with its slice
    PARAMETER_GATHER = ("parameter gather", Resource.INTRA_NODE)
    COMPUTE = ("compute", Resource.GPU)
    # Over the ranks of the node, each keeps its slice
    GRADIENT_REDUCE = ("gradient reduction", Resource.INTRA_NODE)
    # Over nodes, each rank keeps its part of the slice
    GRADIENT_EXCHANGE = ("gradient exchange", Resource.INTER_NODE)
    GRADIENT_DOWNLOAD = ("gradient download", Resource.DEVICE_TO_HOST)
    # Gradients, deferred or saved, that find no room in host memory
    GRADIENT_WRITE = ("gradient write", Resource.SSD)
    GRADIENT_READ = ("gradient read", Resource.SSD)
    STATE_READ = ("state read", Resource.SSD)  # done once it is requested: the update waits for the bytes
    UPDATE = ("update", Resource.ADAM)
    PARAMETER_SPREAD = ("parameter spread", Resource.INTER_NODE)  # what each rank has updated, to all nodes
    STATE_WRITE = ("state write", Resource.SSD)  # parameters and states; the update begins it, chunk by chunk
    # The same of a record that lives in host memory, for a commit
    RESIDENT_WRITE = ("resident write", Resource.SSD)
    # Of several nodes: the parameters, once they are spread
    PARAMETER_WRITE = ("parameter write", Resource.SSD)
    ACTIVATION_DOWNLOAD = ("activation download", Resource.DEVICE_TO_HOST)
    ACTIVATION_WRITE = ("activation write", Resource.SSD)
    ACTIVATION_READ = ("activation read", Resource.SSD)
    ACTIVATION_UPLOAD = ("activation upload", Resource.HOST_TO_DEVICE)
    STEP = ("step", Resource.NONE)  # passes when the caller has ended the step
    COMMIT = ("commit", Resource.NONE)  # fdatasync and manifest

    def __init__(self, label: str, resource: Resource):
        self.label = label
        self.resource = resource

    __hash__ = object.__hash__


#: Exchanges between ranks whose data is on the device. NCCL wants all of them in one order on every rank.
EXCHANGES = (Op.PARAMETER_GATHER, Op.GRADIENT_REDUCE, Op.GRADIENT_EXCHANGE)

#: Tasks that read from or write to the SSDs, for counting bytes.
SSD_READS = frozenset(
    {Op.PARAMETER_READ, Op.PARAMETER_READ_DEVICE, Op.GRADIENT_READ, Op.STATE_READ, Op.ACTIVATION_READ}
)
SSD_WRITES = frozenset(
    {Op.GRADIENT_WRITE, Op.STATE_WRITE, Op.RESIDENT_WRITE, Op.PARAMETER_WRITE, Op.ACTIVATION_WRITE}
)


class Activation(Enum):
    """What a pass leaves for later, by kind of buffer."""

    HIDDEN = "hidden"  # A block's input, or the gradient with respect to it
    # Outputs of operators inside a block, which its recomputation then need not compute; of rows that pass in chunks,
    # all keys and values of a row.
    SAVED = "saved"


@dataclass(eq=False, slots=True)
class Task:
    """A piece of work, compared by identity, built once and run once."""

    op: Op
    after: "list[Task]"  # Tasks that must be finished before this one starts
    nbytes: int = 0  # Bytes that it moves
    flops: float = 0.0  # Floating-point operations that it computes
    step: int = 0
    record: int | None = None  # Index of the record; None for activations and for the end of a step
    # Visit that it belongs to, of a task that computes or that moves what a visit leaves
    visit: Visit | None = None
    micro: int | None = None  # Number of its micro-batch, from 0
    # Index of the buffer slot (or, on SSD, of the file slot or extent) that it takes from
    source: int | None = None
    target: int | None = None  # Index of the slot that it writes to; None for an update that is not written
    gradient: int | None = None  # Gradient slot of an update
    activation: Activation = Activation.HIDDEN  # Kind of activation that it moves
    # Written while running:
    done: bool = False
    event: Any = None  # CUDA event after which the result of a queued task is there
    started_at: float = 0.0
    finished_at: float = 0.0

    def __repr__(self) -> str:
        where = f" {self.visit.phase.value} layer {self.visit.layer}" if self.visit else ""
        return f"<{self.op.label} step {self.step} record {self.record}{where} micro {self.micro}>"


@dataclass(eq=False, slots=True, repr=False, kw_only=True)
class ComputeTask(Task):
    """The computation of one micro-batch of a visit."""

    visit: Visit
    micro: int
    tokens: float = 0.0  # Tokens that it computes on
    places: dict[int, int] = field(default_factory=dict)  # Device buffer of each record that it uses
    inputs: tuple[int, ...] = ()  # Device activation slots that it reads
    output: int | None = None  # Device activation slot that it writes; None if nothing wants its result
    saved: int | None = None  # Device slot of saved activations, written forward and read backward
    begins: bool = True  # Whether it is the first micro-batch of its visit
    gradients: dict[int, int] = field(default_factory=dict)  # Device buffer of each gradient that it adds to
    first: frozenset[int] = frozenset()  # Records whose gradients it is the first to add to
    last: bool = False  # Whether it is the last micro-batch of its visit


def known(index: int | None) -> int:
    """Return an index that tasks of this kind always have."""
    assert index is not None
    return index


@dataclass
class StepList:
    """Tasks that are submitted together, each after all that it waits for."""

    step: int
    tasks: list[Task] = field(default_factory=list)
    end: Task | None = None  # The STEP task, which the caller finishes
    own_loss: bool = False  # Whether the caller computes the loss, between two runs of the head
    chunks: int = 1  # Chunks that each row passes in

    @property
    def forward_phases(self) -> frozenset[Phase]:
        return REFERENCE_PHASES if self.own_loss else FORWARD_PHASES

    def ssd_read_bytes(self) -> int:
        return sum(task.nbytes for task in self.tasks if task.op in SSD_READS)

    def sent_bytes(self) -> int:
        """Return the bytes that this rank sends to other nodes."""
        return sum(task.nbytes for task in self.tasks if task.op.resource is Resource.INTER_NODE)

    def saved_bytes(self, each: int) -> int:
        """Return the bytes of saved outputs left for the backward pass, ``each`` in one buffer."""
        return each * sum(
            isinstance(task, ComputeTask)
            and task.saved is not None
            and task.visit.phase is Phase.BLOCK_FORWARD
            and task.micro % self.chunks == 0
            for task in self.tasks
        )

    def ssd_written_bytes(self) -> int:
        return sum(task.nbytes for task in self.tasks if task.op in SSD_WRITES)


def visit_flops(layout: ModelLayout, visit: Visit, tokens: float, recomputation: Recomputation) -> float:
    """Return a micro-batch's FLOPs: 2 per active parameter and token for each of the forward pass, the gradient of the
    input, the gradients of trained parameters, and the recomputed part of the forward pass.
    """
    part = visit.part
    records = [layout.records[index] for index in visit.records]
    if not visit.ends:  # adapters count once in each pass
        records = [record for record in records if record.kind is not Kind.ADAPTER]
    parameters = sum(record.active_count for record in records)
    trained = sum(record.active_count for record in records if record.index in visit.trained)
    forward = 1.0 if visit.phase in (Phase.BLOCK_FORWARD, Phase.HEAD_EVAL, Phase.HEAD) else 0.0
    if visit.phase is Phase.BLOCK_BACKWARD:
        forward = recomputation.fraction(known(visit.layer)) if part is None else float(part.recomputes)
    if visit.phase is Phase.BLOCK_BACKWARD or (visit.phase is Phase.HEAD and visit.passes_on):
        trained += parameters if part is None or part.differentiates else 0
    elif visit.phase is not Phase.HEAD:
        trained = 0  # an embedding's gradient is a sum of rows
    return 2.0 * tokens * (forward * parameters + trained)
