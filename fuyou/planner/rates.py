"""Rates of a machine: for the simulator, and as measured in a profile."""

from dataclasses import dataclass

from fuyou.layout.model_layout import Phase
from fuyou.schedule.tasks import ComputeTask


@dataclass(frozen=True)
class TaskRates:
    """Rates of a machine, in the units in which tasks count their work."""

    flops_per_second: float  # FLOPs per second of the device, on blocks of the model
    upload_bytes_per_second: float  # Bytes per second from host to device
    download_bytes_per_second: float  # Bytes per second from device to host, at the same time
    read_bytes_per_second: float  # Bytes per second from all SSDs together, reading only
    write_bytes_per_second: float  # To all SSDs, writing only; mixed traffic takes the sum of both times
    adam_parameters_per_second: float
    commit_seconds: float = 0.005  # Seconds for `fdatasync` and the manifest
    non_block_seconds: tuple[tuple[Phase, float], ...] = ()  # Measured seconds per token, outside blocks
    finish_seconds: float = 0.0  # Seconds per block's backward visit for its gradient's norm
    intra_node_bytes_per_second: float = float("inf")  # Bytes per second from one rank of a node to the others
    inter_node_bytes_per_second: float = float("inf")  # From one rank to other nodes, while all send
    message_seconds: float = 0.0  # Seconds that every exchange between ranks takes besides its bytes
    exchanges_in_one_order: bool = False  # Whether exchanges run one at a time, in order (NCCL)
    backward_flops_per_second: float | None = None  # On blocks; None: as in the forward pass

    def compute_seconds(self, task: ComputeTask) -> float:
        for phase, seconds in self.non_block_seconds:
            if phase is task.visit.phase:
                return seconds * task.tokens
        if task.visit.phase is not Phase.BLOCK_BACKWARD:
            return task.flops / self.flops_per_second
        finishes = task.last and (task.visit.part is None or (task.gradient is not None and task.visit.completes))
        finish = self.finish_seconds if finishes else 0.0
        return task.flops / (self.backward_flops_per_second or self.flops_per_second) + finish


FORMAT = 8  # Version of the JSON: profiles of another one are not read, but measured again


@dataclass(frozen=True)
class Profile:
    """Rates and times of one machine with one model and one micro-batch."""

    device: str  # Name of the device that computes
    tokens: int  # Tokens in a micro-batch
    # Seconds of one micro-batch, part by part, as in the engine's tasks.
    measured_tokens: int  # Tokens that were run; times are scaled up to a whole micro-batch
    matmul_flops_per_second: float  # FLOPs per second of matrix products with the shapes of the block's parameters
    embed_forward_seconds: float
    block_forward_seconds: float
    block_backward_seconds: float  # Seconds with the forward pass computed again, as far as it is needed
    block_finish_seconds: float  # Seconds for squaring a block's gradient, once per visit
    head_seconds: float  # Seconds of forward and backward pass
    head_forward_seconds: float
    embed_backward_seconds: float
    block_parameters: float  # Parameters of a block that one token uses: of routed experts those that it visits
    upload_bytes_per_second: float  # Bytes per second from host to device while both directions are busy
    download_bytes_per_second: float

    read_bytes_per_second: float  # Bytes per second from all SSDs together, through the store, reading only
    write_bytes_per_second: float  # Past the drives' fast caches
    burst_write_bytes_per_second: float  # At first, while the fast caches have room
    commit_seconds: float  # Seconds for `fdatasync` and manifest

    adam_parameters_per_second: float  # Parameters per second that the optimizer process updates alone
    adam_threads: int

    measured_at: float  # Time of the measurement, in seconds since the epoch
    measured_in_seconds: float

    def rates(self, recomputed: float = 1.0) -> TaskRates:
        """Return the rates for the simulator.

        Args:
            recomputed: fraction of a block's forward FLOPs that the measured backward pass computed again.
        """
        flops = 2.0 * self.block_parameters * self.tokens
        return TaskRates(
            flops_per_second=flops / self.block_forward_seconds,
            backward_flops_per_second=(2 + recomputed) * flops / self.block_backward_seconds,
            upload_bytes_per_second=self.upload_bytes_per_second,
            download_bytes_per_second=self.download_bytes_per_second,
            read_bytes_per_second=self.read_bytes_per_second,
            write_bytes_per_second=self.write_bytes_per_second,
            adam_parameters_per_second=self.adam_parameters_per_second,
            commit_seconds=self.commit_seconds,
            non_block_seconds=(
                (Phase.EMBED_FORWARD, self.embed_forward_seconds / self.tokens),
                (Phase.HEAD, self.head_seconds / self.tokens),
                (Phase.HEAD_EVAL, self.head_forward_seconds / self.tokens),
                (Phase.EMBED_BACKWARD, self.embed_backward_seconds / self.tokens),
            ),
            finish_seconds=self.block_finish_seconds,
        )
