"""The scheme of the paper itself (Liao et al. 2024, arXiv:2403.06504), to compare with ours and with its figures.

Differences from our scheme: 14 bytes of states and parameters per parameter, of which 30 move in a step (equations 4
and 7); one micro-batch per step; no update is deferred, and a step begins when the last update of the one before is on
SSD; parameters are not cached from step to step; whole blocks are the unit of transfer and update; states have one
slot. How many activations are saved follows equations 1 to 12 and table 2. The task list is the scheduler's all the
same.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from common.units import format_bytes
from fuyou.layout.model_layout import BufferCounts, ModelLayout
from fuyou.layout.record import Precision
from fuyou.layout.visits import Phase
from fuyou.planner.evaluate import Evaluator, busy_seconds
from fuyou.planner.machine import Machine
from fuyou.planner.rates import TaskRates
from fuyou.planner.run_plan import RunPlan, missing_space
from fuyou.planner.simulated_machine import Simulation
from fuyou.planner.simulator import Simulator
from fuyou.planner.training_job import TrainingJob
from fuyou.schedule.batch import Batch, BatchShape
from fuyou.schedule.memory_plan import MemoryPlan
from fuyou.schedule.scheduler import Scheduler
from fuyou.schedule.tasks import Op, StepList, Task

DEVICE_BUFFERS = BufferCounts(device_blocks=2, device_block_gradients=2, host_blocks=5, host_block_gradients=2)
"""Buffers of whole blocks that fill device memory: parameters and fp16 gradients, two of each, so that one moves while
the other computes. (With three or five, the largest model on an RTX 4090 would not be the one that the paper names.)"""
STATE_BUFFERS = 3 * 4
"""fp32 host buffers of whole blocks: the optimizer is "based on ZeRO-Infinity's", which holds four tensors of a group
(parameter, gradient, mean, variance), for a group that is read, one that is updated, and one that is written."""
HOST_OVERHEAD_BYTES = 8 << 30
"""Host memory of two Python processes with CUDA's libraries, and of the system."""
SAVED_BYTES = 34
"""Bytes per token and hidden unit of what one block saves for its backward pass: Korthikanti et al. 2022
(arXiv:2205.05198), equation 1, attention by a fused kernel."""
LINEAR_LAYERS = ((1, 8.0), (3, 6.0), (1, 2.0), (4, 8.0))
"""Table 2: (output in units of b s h elements, FLOPs in units of b s h^2), first the layer of high priority."""
_CHUNKS_PER_GROUP = 2
"""What is decayed and what is not are updated one after the other."""
_PREFETCH = 2
"""Layers by which a swapped activation comes back before it is used."""


class PaperPrecision(Precision):
    """fp16 parameters beside fp32 masters and moments."""

    def state_nbytes(self, elements: int) -> int:
        """Return 12 bytes for each element."""
        return 12 * elements


@dataclass(frozen=True)
class Swap:
    """Activations that are saved beyond block inputs: the paper's D_f."""

    linears: tuple[int, ...] = ()
    """Number of blocks that save the output of each of table 2's four layers."""
    nbytes: int = 0
    """Bytes of a step."""
    saved_flops: float = 0.0
    """FLOPs that a step need not recompute."""
    coefficient: float = 0.0
    """Fraction of all activations inside blocks (section 5.6)."""


@dataclass(frozen=True)
class PaperScheme:
    """One job on one machine, as the paper runs it."""

    job: TrainingJob
    machine: Machine
    overlaps: bool = True
    """Whether updates run beside the backward pass (section 4.3); without it, gradients wait on SSD for them."""
    update_groups: int | None = None
    """Groups (blocks) that the optimizer works on at once: with two, updates overlap with I/O; with one, reading,
    updating and writing a group come one after the other. None: two without overlap, as section 4.4 has it of that
    ("during the optimizer stage, Fuyou overlaps CPU computation and SSD accesses as well"); one with overlap. Section
    4.3 says otherwise, but its throughputs say so: with two, 175B on an RTX 4090 would reach 99 TFLOP/s, not 86."""

    @property
    def shape(self) -> ModelLayout:
        precision = self.job.shape.precision
        return self.job.shape.with_precision(PaperPrecision(precision.dtype, precision.optimizer_dtype))

    @property
    def _groups(self) -> int:
        return self.update_groups or (1 if self.overlaps else 2)

    @cached_property
    def rates(self) -> TaskRates:
        """Rates of the machine, with attention counted."""
        return Evaluator(self.job, self.machine).rates

    @property
    def elements(self) -> int:
        """Number of all parameters, padding included: the paper's p."""
        return sum(record.numel for record in self.job.shape.records)

    @property
    def ssd_bytes(self) -> int:
        return 14 * self.elements + (0 if self.activations_on_host else self.activation_bytes * (self.layers + 2))

    @property
    def layers(self) -> int:
        return len(self.job.shape.blocks)

    @property
    def hidden(self) -> int:
        return int(self.job.config.get_text_config().hidden_size)

    @property
    def activation_bytes(self) -> int:
        """Bytes of one block's input."""
        return 2 * self.job.tokens * self.hidden

    # -- memory -------------------------------------------------------------------------------------------------------

    @property
    def device_bytes(self) -> int:
        """Bytes of four buffers of a block, through which embedding and head pass, too, and of what one block saves."""
        buffers = DEVICE_BUFFERS.device_blocks + DEVICE_BUFFERS.device_block_gradients
        block = self.job.shape.block_elements
        return buffers * block * 2 + SAVED_BYTES * self.job.tokens * self.hidden

    @property
    def buffer_host_bytes(self) -> int:
        """Bytes of page-locked buffers, which PyTorch rounds up to a power of two, and of the processes."""
        block = self.job.shape.block_elements
        in_16_bits = DEVICE_BUFFERS.host_blocks + DEVICE_BUFFERS.host_block_gradients
        return STATE_BUFFERS * _power_of_two(4 * block) + in_16_bits * _power_of_two(2 * block) + HOST_OVERHEAD_BYTES

    @property
    def activations_on_host(self) -> bool:
        """Whether activations stay in host memory, where there is room (section 4.4)."""
        inputs = (self.layers + 1) * self.activation_bytes
        return self.buffer_host_bytes + inputs + self.swap().nbytes <= self.machine.host_bytes

    def missing(self) -> tuple[str, ...]:
        """Return sentences that say what the machine lacks."""
        lacks = []
        for what, needed, there in (
            ("device", self.device_bytes, self.machine.device_bytes),
            ("host", self.buffer_host_bytes, self.machine.host_bytes),
        ):
            if needed > there:
                lacks.append(f"It takes {format_bytes(needed)} of {what} memory, and there are {format_bytes(there)}.")
        return (*lacks, *missing_space(14 * self.elements, self.machine))

    # -- equations 1 to 12 --------------------------------------------------------------------------------------------

    def swap(self) -> Swap:
        """Return the activations to swap: the first ones of the list of priorities, as many as make T_iter least."""
        best, least = Swap((0,) * len(LINEAR_LAYERS)), self.iteration_seconds(0, 0.0)
        for swap in self._swaps():
            seconds = self.iteration_seconds(swap.nbytes, swap.saved_flops)
            if seconds < least:
                best, least = swap, seconds
        return best

    def iteration_seconds(self, swapped: float, saved_flops: float) -> float:
        """Return T_iter by equation 1, with equations 2 to 8; ``swapped`` is D_f without the block inputs.

        Without overlap the optimizer's stage comes by itself, for which the paper gives no equation: its terms of
        equations 5 and 7 are taken out of the backward pass.
        """
        rates, p = self.rates, float(self.elements)
        link = min(rates.upload_bytes_per_second, rates.download_bytes_per_second)
        moved = swapped + self.layers * self.activation_bytes
        compute = self.forward_flops / rates.flops_per_second  # T_f^comp
        forward = max(
            compute,
            max(2 * p, moved) / link,  # (3)
            2 * p / rates.read_bytes_per_second + moved / rates.write_bytes_per_second,  # (4)
        )
        recompute = (self.forward_flops - saved_flops) / rates.flops_per_second  # RC(D_f)
        adam = p / rates.adam_parameters_per_second
        states = 14 * p / rates.write_bytes_per_second
        backward = max(2 * compute + recompute, (2 * p + moved) / link)  # (8), (6)
        if self.overlaps:
            read = (14 * p + moved) / rates.read_bytes_per_second
            return forward + max(backward, adam, read + states)  # (7)
        # The same bytes and gradients that wait on SSD (section 4.3), each in its own stage.
        read = (2 * p + moved) / rates.read_bytes_per_second
        backward = max(backward, read + 2 * p / rates.write_bytes_per_second)
        return forward + backward + max(adam, 14 * p / rates.read_bytes_per_second + states)

    @property
    def forward_flops(self) -> float:
        return 2.0 * self.job.block_parameters * self.job.tokens

    def _swaps(self) -> Iterator[Swap]:
        tokens, hidden = self.job.tokens, self.hidden
        everything = self.layers * sum(width for width, _ in LINEAR_LAYERS)
        blocks, units, flops = [0] * len(LINEAR_LAYERS), 0, 0.0
        for number, (width, cost) in enumerate(LINEAR_LAYERS):
            for _ in range(self.layers):
                blocks[number] += 1
                units += width
                flops += cost * tokens * hidden**2
                yield Swap(tuple(blocks), units * tokens * hidden * 2, flops, units / everything)

    # -- the task list ------------------------------------------------------------------------------------------------

    def memory(self) -> MemoryPlan:
        """Return the buffers as the scheduler counts them: one micro-batch, whole blocks."""
        job = self.job
        inputs = self.layers + 3
        counts = replace(
            DEVICE_BUFFERS,
            device_activations=6,
            host_activations=inputs if self.activations_on_host else 6,
            ssd_activations=0 if self.activations_on_host else inputs,
        )
        largest = max(record.numel for record in job.shape.records)
        host = self.buffer_host_bytes
        if self.activations_on_host:
            host += inputs * self.activation_bytes + self.swap().nbytes
        return MemoryPlan(
            counts,
            Batch(job.rows, job.seq_len, job.rows),
            _CHUNKS_PER_GROUP * self._groups,
            largest,
            self.activation_bytes,
            0,
            job.seq_len,
            False,
            False,
            SAVED_BYTES * job.tokens * self.hidden,
            self.device_bytes,
            host,
        )

    def simulate(self, swap: Swap | None = None, steps: int = 3) -> tuple[Simulation, StepList]:
        """Simulate consecutive steps; return also the tasks of the last one.

        Args:
            swap: activations that are swapped; None takes what the equations say.
            steps: number of steps.
        """
        swap = self.swap() if swap is None else swap
        plan, shape, rates = self.memory(), self.shape, self.rates
        deferred = () if self.overlaps else [record.index for record in shape.records]
        scheduler = Scheduler(shape, plan.counts, single_slot=True, deferred=deferred)
        batch = BatchShape(1, plan.activation_bytes, plan.batch.mean_tokens)
        swapping = _Swapping(self, swap)
        lists = []
        for number in range(1, steps + 1):
            step = scheduler.training_step(number, batch, commit=False)
            swapping.add(step)
            if not self.overlaps:
                step.tasks += scheduler.flush(number, commit=False).tasks
            step.tasks.remove(_step_end(step))
            step.tasks.append(_step_end(step))
            _step_end(step).after = list(step.tasks[:-1])  # the next step begins when this one is over
            lists.append(step)
        simulator = Simulator(shape.records, rates, plan.ring_chunks, plan.chunk_elements)
        return simulator.run(lists), lists[-1]

    def plan(self) -> RunPlan:
        """Return the plan, as :func:`fuyou.planner.run_plan.plan` does for our scheme."""
        missing = self.missing()
        if missing:
            return RunPlan(self.job, self.machine, "fuyou", missing, ssd_bytes=self.ssd_bytes)
        swap, memory = self.swap(), self.memory()
        simulation, tasks = self.simulate(swap)
        return RunPlan(
            self.job,
            self.machine,
            "fuyou",
            memory=memory,
            kept_activation_bytes=swap.nbytes,
            step_seconds=simulation.step_seconds(),
            busy=busy_seconds(tasks, self.rates),
            tasks=tasks,
            simulation=simulation,
            saved_flops=swap.saved_flops,
            ssd_bytes=self.ssd_bytes,
            device_peak_bytes=memory.device_bytes,
            host_peak_bytes=memory.host_bytes,
        )


class _Swapping:
    """Adds the traffic of swapped activations to a step's tasks, and subtracts the recomputation that they save."""

    def __init__(self, scheme: PaperScheme, swap: Swap):
        self._to_ssd = not scheme.activations_on_host
        tokens, hidden = scheme.job.tokens, scheme.hidden
        self._bytes = [0] * scheme.layers
        self._flops = [0.0] * scheme.layers
        for (width, cost), blocks in zip(LINEAR_LAYERS, swap.linears, strict=False):
            for layer in range(blocks):
                self._bytes[layer] += 2 * width * tokens * hidden
                self._flops[layer] += cost * tokens * hidden**2

    def add(self, step: StepList) -> None:
        """Insert the tasks where they belong in the order of the list."""
        away: dict[int, Task] = {}
        leaving: list[Task] = []  # one block behind, or a block's input would queue behind what the last one saved
        backward: list[Task] = []
        tasks: list[Task] = []
        for task in step.tasks:
            block = _block_of(task)
            swapped = 0 if block is None else self._bytes[block]
            phase = task.visit.phase if task.visit else None
            if block is not None and swapped and phase is Phase.BLOCK_BACKWARD:
                task.flops -= self._flops[block]
                before = backward[-_PREFETCH:][:1]
                back = [away[block], *before]
                if self._to_ssd:
                    tasks.append(_activation(Op.ACTIVATION_READ, back, swapped, task))
                    back = [tasks[-1]]
                tasks.append(_activation(Op.ACTIVATION_UPLOAD, back, swapped, task))
                task.after.append(tasks[-1])
            tasks.append(task)
            if task.op is Op.COMPUTE:
                tasks += leaving
                leaving = []
            if phase is Phase.BLOCK_BACKWARD:
                backward.append(task)
            if block is not None and swapped and phase is Phase.BLOCK_FORWARD:
                leaving = [_activation(Op.ACTIVATION_DOWNLOAD, [task], swapped, task)]
                if self._to_ssd:
                    leaving.append(_activation(Op.ACTIVATION_WRITE, leaving[:1], swapped, task))
                away[block] = leaving[-1]
        step.tasks = tasks


def _block_of(task: Task) -> int | None:
    """Return the index of the block that a task computes, forward or backward."""
    if task.visit is None or task.visit.phase not in (Phase.BLOCK_FORWARD, Phase.BLOCK_BACKWARD):
        return None
    return task.visit.layer


def _activation(op: Op, after: list[Task], nbytes: int, of: Task) -> Task:
    return Task(op, after, nbytes=nbytes, step=of.step, record=of.record, visit=of.visit, micro=0)


def _step_end(step: StepList) -> Task:
    assert step.end is not None
    return step.end


def _power_of_two(nbytes: int) -> int:
    return 1 << (nbytes - 1).bit_length()
