"""Who competes, with which settings, and what each is reckoned to need."""

from dataclasses import dataclass, field
from typing import Any

TUNED_MALLOC = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(64 << 30)}
"""glibc keeps what is freed instead of giving it back to the kernel: no page faults on every activation."""

INTERPRETER_BYTES = 1 << 30  # What a contender needs apart from what grows with the model


@dataclass(frozen=True)
class Entry:
    """A contender as the benchmark knows it."""

    name: str
    module: str
    what: str  # For the reader, one line
    settings: dict[str, Any] = field(default_factory=dict)
    deepspeed: bool = False  # Whether it runs in DeepSpeed's environment
    on_ssd: bool = False  # Whether its states are on SSD, so that the drive bounds it
    bytes_per_parameter: float = 0.0  # Reckoned host memory; it is left out where that does not fit
    tight: "Entry | None" = None  # What stands in where memory does not suffice


def zero_infinity(largest_parameter: int, *, pipeline: bool, low_memory: bool = False) -> dict[str, Any]:
    """DeepSpeed's settings with parameters and optimizer on SSD, as found by trying; see docs/benchmarks.md.

    * Each parameter buffer must hold the largest parameter; parameters below 1 MiB never leave memory.
      With the defaults of ``stage3_max_reuse_distance``, ``stage3_prefetch_bucket_size`` and
      ``stage3_param_persistence_threshold``, parameters hold on to their buffers and a step ends with "Not enough
      buffers 0 for swapping 1".
    * A sub-group of the optimizer must fit into a parameter buffer ("numel of fp16 buffers ... is too small"), and is
      closed by the parameter that reaches ``sub_group_size``: half of the largest parameter leaves room for that one.
      Four buffers do; with pipelining four and eight end in ``assert allocated_buffers is not None``, twelve do.
    """
    return {
        "device": "nvme",
        "initialise_on": "nvme",
        "aio": {
            "block_size": 1 << 20, "queue_depth": 32, "intra_op_parallelism": 4, "single_submit": False,
            "overlap_events": True,
        },
        "offload_optimizer": {
            "pipeline_read": pipeline, "pipeline_write": pipeline, "buffer_count": 12 if pipeline else 4,
            "pin_memory": not low_memory, "fast_init": True,
        },
        "offload_param": {
            "buffer_count": 12 if low_memory else 16, "buffer_size": largest_parameter + 4096, "max_in_cpu": 0,
            "pin_memory": not low_memory,
        },
        "zero": {
            "sub_group_size": largest_parameter // 2,
            "stage3_param_persistence_threshold": 0,
            "stage3_max_reuse_distance": 0,
            "stage3_prefetch_bucket_size": 0 if low_memory else 10_000_000,
            "reduce_bucket_size": 20_000_000 if low_memory else 50_000_000,
            "overlap_comm": not low_memory,
        },
    }  # fmt: skip


def entries(largest_parameter: int) -> dict[str, Entry]:
    """All contenders of bench_peers.py by name, in the order in which a round runs them.

    Args:
        largest_parameter: elements of the model's largest parameter.
    """
    pipelined = zero_infinity(largest_parameter, pipeline=True)
    every = [
        Entry(
            "in-memory", "peers.in_memory", "PyTorch in memory: fp32 masters, fused AdamW, a checkpoint per block",
            bytes_per_parameter=18,
            tight=Entry(
                "in-memory", "peers.in_memory",
                "PyTorch in memory, each parameter updated within the backward pass (all gradients do not fit)",
                {"step_in_backward": True}, bytes_per_parameter=14.5,
            ),
        ),
        Entry(
            "fuyou", "peers.streamed", "this engine, everything streamed from SSD", {"host_memory": "streamed"},
            on_ssd=True,
        ),
        Entry(
            "zero-infinity", "peers.deepspeed_offload", "DeepSpeed ZeRO-3, parameters and optimizer on SSD",
            zero_infinity(largest_parameter, pipeline=False), deepspeed=True, on_ssd=True,
        ),
        Entry(
            "zero-infinity-pipelined", "peers.deepspeed_offload", "the same with pipeline_read and pipeline_write",
            pipelined, deepspeed=True, on_ssd=True,
        ),
        Entry(
            "fuyou-cached", "peers.streamed", "this engine with as much memory as ZeRO-Infinity took",
            {"host_memory": "equal"}, on_ssd=True,
        ),
        Entry(
            "deepspeed-cpu", "peers.deepspeed_offload", "DeepSpeed ZeRO-3, parameters and optimizer in host memory",
            {"device": "cpu", "initialise_on": "cpu", "zero": {"overlap_comm": True}}, deepspeed=True,
            bytes_per_parameter=20,
        ),
        Entry(
            "fsdp2", "peers.fsdp2_offload", "PyTorch FSDP2 with CPUOffloadPolicy, fp32 shards", bytes_per_parameter=18,
        ),
    ]  # fmt: skip
    return {entry.name: entry for entry in every}
