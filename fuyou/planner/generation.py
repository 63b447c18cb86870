"""How fast sequences would be generated between steps: the task lists of two kinds of pass, on the machine's clock.

A pass over the prompts computes as a forward pass of training does. One for a token each computes little: it takes as
long as the weights take to arrive, or as a block takes with so few tokens, which is measured where the machine is at
hand.
"""

from dataclasses import dataclass, replace
from typing import Any

from common.units import format_bytes, format_seconds
from fuyou.layout.key_values import KeyValueCache
from fuyou.layout.visits import Phase
from fuyou.planner.evaluate import SAVE_NOTHING, Candidate, Evaluator, busy_seconds
from fuyou.planner.machine import Machine
from fuyou.planner.profiling.blocks import BlockBench, ForwardTimes
from fuyou.planner.rates import TaskRates
from fuyou.planner.simulator import Simulator
from fuyou.planner.training_job import TrainingJob
from fuyou.runtime.devices.device import Device
from fuyou.schedule.batch import ENGINE_LOSS, BatchShape
from fuyou.schedule.memory_plan import MemoryPlan
from fuyou.schedule.scheduler import Scheduler
from fuyou.schedule.tasks import Op, Resource, StepList, Task

_PASSES = 4
"""Passes that are simulated, the last of which counts."""


@dataclass(frozen=True)
class GenerationJob:
    """Sequences that are generated together."""

    rows: int
    """Prompts."""
    prompt: int
    """Tokens of each."""
    new: int
    """New tokens of each."""


@dataclass(frozen=True)
class GenerationPlan:
    """How long generation takes, and what it takes."""

    job: GenerationJob
    cache: KeyValueCache
    """Keys and values, on their tiers."""
    prompt_seconds: float
    """Seconds of the first pass, which ends with the first new tokens."""
    token_seconds: float
    """Seconds of each further pass, at half of all new tokens."""
    read_bytes: int
    """Bytes read from SSD in each pass."""
    bound: Resource
    """What bounds a pass for a token each."""
    key_value_seconds: float
    """Seconds of each further pass in which keys and values come to where blocks compute; the device waits for them."""

    @property
    def seconds(self) -> float:
        """Seconds of all passes."""
        return self.prompt_seconds + (self.job.new - 1) * self.token_seconds

    @property
    def tokens_per_second(self) -> float:
        """New tokens of all sequences in a second."""
        return self.job.rows * self.job.new / self.seconds

    def describe(self) -> str:
        """Return the plan in words."""
        job, tier = self.job, "the device's memory"
        if self.cache.device_layers < len(self.cache.layers):
            tier = f"host memory (of {self.cache.device_layers} blocks, the device's)"
        return (
            f"{job.rows:,} x {job.new:,} tokens after {job.prompt:,}: {self.tokens_per_second:.3g} tokens/s, "
            f"{format_seconds(self.token_seconds)} for each token of all, {format_seconds(self.prompt_seconds)} for "
            f"the prompts; bound by {self.bound.value.replace('_', ' ')}, {format_bytes(self.read_bytes)} read per "
            f"token; keys and values take {format_bytes(self.cache.nbytes)} in {tier}, "
            f"{format_seconds(self.key_value_seconds)} of each token's time"
        )

    def to_json(self) -> dict[str, Any]:
        """Return the plan as JSON."""
        return {
            "sequences": self.job.rows,
            "prompt_tokens": self.job.prompt,
            "new_tokens": self.job.new,
            "tokens_per_second": self.tokens_per_second,
            "prompt_seconds": self.prompt_seconds,
            "token_seconds": self.token_seconds,
            "ssd_read_bytes_per_token": self.read_bytes,
            "key_value_bytes": self.cache.nbytes,
            "key_value_host_bytes": self.cache.host_bytes,
            "key_value_seconds": self.key_value_seconds,
            "bound": self.bound.value,
        }


def plan_generation(
    job: TrainingJob,
    machine: Machine,
    generation: GenerationJob,
    layers: KeyValueCache,
    device: Device | None = None,
) -> GenerationPlan:
    """Return how fast the weights of a run generate, between its steps.

    Args:
        job: the run.
        machine: that it runs on.
        generation: what is generated.
        layers: keys and values of these sequences.
        device: the machine's device, if it is at hand: then a block is run with few tokens. None: computing on so few
            takes as long as its FLOPs, at least.

    Raises:
        UserError: there is no room for it.
    """
    evaluator = Evaluator(
        replace(job, rows=generation.rows, seq_len=generation.prompt, loss=ENGINE_LOSS, cache=layers), machine
    )
    memory = evaluator.memory(Candidate(job.micro_batch, 0.0, SAVE_NOTHING))
    cache = memory.batch.cache
    assert cache is not None
    prompt, _ = _pass_seconds(evaluator.job, memory, evaluator.rates, memory.batch_shape(memory.batch))
    tokens = memory.batch.rows / memory.batch.micro_batches
    shape = replace(memory.batch_shape(memory.batch), tokens=tokens)
    times = None
    if device is not None:
        stack, layout = evaluator.job.stack, evaluator.job.shape
        times = BlockBench(stack, layout, device, memory.batch.micro_rows, 1, 1).forward_times()
    rates = _token_rates(evaluator, memory, _fetch_seconds(evaluator, cache, generation), times)
    seconds, last = _pass_seconds(evaluator.job, memory, rates, shape)
    busy = busy_seconds(last, rates)
    bound = max(busy, key=lambda resource: busy[resource])
    fetched = _fetch_seconds(evaluator, cache, generation)
    return GenerationPlan(generation, cache, prompt, seconds, last.ssd_read_bytes(), bound, fetched)


def _fetch_seconds(evaluator: Evaluator, cache: KeyValueCache, generation: GenerationJob) -> float:
    """Return the seconds of a pass in which keys and values come over the link, or, where the CPU computes, from its
    memory, no slower than that."""
    nbytes = cache.nbytes if evaluator.machine.cpu else cache.host_bytes
    seen = (generation.prompt + generation.new / 2) / cache.tokens
    return seen * nbytes / evaluator.rates.upload_bytes_per_second


def _token_rates(
    evaluator: Evaluator, memory: MemoryPlan, fetch_seconds: float, times: ForwardTimes | None
) -> TaskRates:
    """Return the machine's rates with the time that a block takes for one token of each row, keys and values read."""
    rates, job, batch = evaluator.rates, evaluator.job, memory.batch
    rows, blocks = batch.rows / batch.micro_batches, len(job.shape.blocks)
    beside = fetch_seconds / blocks / batch.micro_batches
    flops = 2.0 * rows * job.block_parameters / blocks
    if times is None:
        return replace(rates, flops_per_second=flops / (flops / rates.flops_per_second + beside))
    outside = ((Phase.EMBED_FORWARD, times.embedding / rows), (Phase.HEAD_EVAL, times.head / rows))
    return replace(rates, flops_per_second=flops / (times.block + beside), non_block_seconds=outside)


def _pass_seconds(job: TrainingJob, memory: MemoryPlan, rates: TaskRates, shape: BatchShape) -> tuple[float, StepList]:
    """Return the seconds of a pass in the steady state, and its tasks."""
    scheduler = Scheduler(job.shape, memory.counts, resident=memory.resident, direct_reads=job.direct_reads)
    lists = []
    for number in range(_PASSES):
        tasks = scheduler.evaluation(number, shape)
        tasks.end = Task(Op.STEP, [], step=number)
        tasks.tasks.append(tasks.end)
        lists.append(tasks)
    simulator = Simulator(job.shape.records, rates, memory.ring_chunks, memory.chunk_elements)
    return simulator.run(lists).step_seconds(), lists[-1]
