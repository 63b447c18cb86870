"""What our planner predicts for the paper's own scheme, next to every number that the paper's text gives.

Fuyou: Liao et al. 2024, "Adding NVMe SSDs to Enable and Accelerate 100B Model Fine-tuning on a Single GPU",
arXiv:2403.06504. One set of rates for all rows, each with its source below; nothing is fitted to a row. Next to each
throughput stands what our own scheme would do on the same machine.

    python scripts/reproduce_fuyou.py

Differences of the paper's scheme from ours: 14 bytes of states and parameters per parameter, of which 30 move in a step
(equations 4 and 7); one micro-batch per step; no update is deferred, and a step begins when the last update of the one
before is on SSD; parameters are not cached from step to step; whole blocks are the unit of transfer and update; states
have one slot. How many activations are saved follows equations 1 to 12 and table 2. The task list is the scheduler's.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property

import click

from common.hardware.presets import drive_preset, gpu_preset
from common.units import format_bytes
from fuyou.layout.model_layout import BufferCounts, ModelLayout
from fuyou.layout.record import Precision
from fuyou.layout.visits import Phase
from fuyou.planner import Machine, RunPlan, TrainingJob, describe_training, plan, preset_machine
from fuyou.planner.evaluate import Evaluator, busy_seconds
from fuyou.planner.rates import TaskRates
from fuyou.planner.run_plan import fits, largest_model, missing_space
from fuyou.planner.simulated_machine import Simulation
from fuyou.planner.simulator import Simulator
from fuyou.schedule.batch import Batch, BatchShape
from fuyou.schedule.memory_plan import MemoryPlan
from fuyou.schedule.scheduler import Scheduler
from fuyou.schedule.tasks import Op, StepList, Task

# -- the paper's scheme -----------------------------------------------------------------------------------------------

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
    """fp16 parameters next to fp32 masters and moments."""

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
    """Whether updates run during the backward pass (section 4.3); without it, gradients wait on SSD for them."""

    @property
    def shape(self) -> ModelLayout:
        precision = self.job.shape.precision
        return self.job.shape.with_precision(PaperPrecision(precision.dtype, precision.optimizer_dtype))

    @property
    def _groups(self) -> int:
        """Groups (blocks) that the optimizer works on at once: with two, updates overlap with I/O.

        Section 4.4 has two without overlap ("during the optimizer stage, Fuyou overlaps CPU computation and SSD
        accesses as well"). Section 4.3 says the same with overlap, but its throughputs say one: with two, 175B on an
        RTX 4090 would reach 99 TFLOP/s, not 86.
        """
        return 1 if self.overlaps else 2

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

        Without overlap the optimizer's stage comes alone, for which the paper gives no equation: its terms of
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
            DEVICE_BUFFERS, device_activations=6, host_activations=inputs if self.activations_on_host else 6,
            ssd_activations=0 if self.activations_on_host else inputs,
        )  # fmt: skip
        largest = max(record.numel for record in job.shape.records)
        host = self.buffer_host_bytes
        if self.activations_on_host:
            host += inputs * self.activation_bytes + self.swap().nbytes
        return MemoryPlan(
            counts, Batch(job.rows, job.seq_len, job.rows), _CHUNKS_PER_GROUP * self._groups, largest,
            self.activation_bytes, 0, job.seq_len, False, False, SAVED_BYTES * job.tokens * self.hidden,
            self.device_bytes, host,
        )  # fmt: skip

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
        """Return the plan, as :func:`fuyou.planner.plan` does for our scheme."""
        missing = self.missing()
        if missing:
            return RunPlan(self.job, self.machine, missing, ssd_bytes=self.ssd_bytes)
        swap, memory = self.swap(), self.memory()
        simulation, tasks = self.simulate(swap)
        return RunPlan(
            self.job, self.machine, memory=memory, kept_activation_bytes=swap.nbytes,
            step_seconds=simulation.step_seconds(), busy=busy_seconds(tasks, self.rates), tasks=tasks,
            simulation=simulation, saved_flops=swap.saved_flops, ssd_bytes=self.ssd_bytes,
            device_peak_bytes=memory.device_bytes, host_peak_bytes=memory.host_bytes,
        )  # fmt: skip


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


# -- its figures -------------------------------------------------------------------------------------------------------

SEQ_LEN = 1024
"""Section 5.1."""
DRIVES = 12
"""Table 3: twelve Intel P5510 of 3.84 TB; their rates are their specification's (configs/drives)."""
DRIVES_LIMIT = 24.5e9
"""Most bytes per second to and from all drives: what one PCI Express 4.0 link of 16 lanes reached on an A100 server
(nvbandwidth issues 11 and 53; configs/gpus/a100-80g.toml). Assumed: the paper does not say how the drives are
attached, but counts SSD traffic as simplex (4.3), and more than six drives (27 GB/s of it) gained little (5.7)."""
ADAM = 3.9e9
"""Parameters per second of DeepSpeed's CPU-Adam, on which the paper's optimizer stands. Not confirmed: from memory of
ZeRO-Offload (Ren et al. 2021, arXiv:2101.06840), table 4, 2.57 s for 10 B parameters. What hangs on it: with 2.0e9, the
throughputs of 13B predicted below fall by less than 1 %, those of larger models by 5 to 13 %, the gains of overlapping
change by up to 5 %, and sizes and swaps not at all."""


@dataclass(frozen=True)
class Throughput:
    model: str
    gpu: str
    batch: int
    published: float
    """TFLOP/s with recomputation."""
    where: str
    """Section, and where the batch size is from."""


THROUGHPUTS = (
    Throughput("gpt3-13b", "a100-80g", 80, 202, "5.3; largest batch that 5.6 names"),
    Throughput("gpt3-13b", "rtx-4090", 64, 156, "5.3; largest batch that 5.4 names"),
    Throughput("gpt3-175b", "a100-80g", 64, 173, "5.3; batch assumed as for 276B"),
    Throughput("gpt3-175b", "rtx-4090", 16, 86, "5.3; largest batch that 5.4 names"),
    Throughput("gpt3-276b", "a100-80g", 64, 168, "5.3"), Throughput("gpt3-412b", "a100-80g", 64, 163, "5.3"),
)  # fmt: skip
"""The batches on an RTX 4090 agree with the evaluation data published with Ratel (ICDE 2025), as this paper was called
later: 155.8 TFLOP/s at 64 and 86.9 at 16 on such a server. It has no data on an A100."""
SIZES = (
    ("rtx-4090", 128, "gpt3-65b"), ("rtx-4090", 768, "gpt3-276b"), ("a100-80g", 768, "gpt3-805b"),
    ("a100-80g", 384, None),
)  # fmt: skip
"""(GPU, host memory in GB, model): section 5.2. None: more than an RTX 4090 can there ("no less than 384 GB")."""
OVERLAP = (
    ("gpt3-13b", 8, 1.09), ("gpt3-13b", 16, 1.25), ("gpt3-13b", 32, 1.38), ("gpt3-13b", 64, 1.22),
    ("gpt3-175b", 8, 1.16), ("gpt3-175b", 16, 1.18),
)  # fmt: skip
"""(model, batch, throughput over that without overlap): section 5.4, on an RTX 4090."""
SWAPS = ((32, False), (64, True), (80, True))
"""(batch, whether activations are swapped): section 5.6, 13B on an A100."""


SERVER_DOLLARS, DRIVE_DOLLARS = 14_098, 308
GPU_DOLLARS = {"rtx-4090": 1_600, "a100-80g": 14_177}
"""Table 5, March 2024: a commodity 4U server without GPUs and SSDs, an Intel P5510 of 3.84 TB, and the GPUs."""
DRIVE_COUNTS = (2, 4, 6, 8, 10, 12)
"""Figure 10: drives among which 6 give most tokens per dollar, 175B on an RTX 4090 (section 5.7)."""


def machine(gpu: str, host_gb: int = 768, drives: int = DRIVES) -> Machine:
    """Return the server of table 3 with one of its GPUs. Memory modules come in powers of two: a GB is 2**30 bytes."""
    return preset_machine(
        gpu_preset(gpu), drive_preset("intel-p5510-3.84tb"), drives, host_gb << 30, drives_limit=DRIVES_LIMIT,
        adam_parameters_per_second=ADAM,
    )  # fmt: skip


@cache
def _model(name: str) -> TrainingJob:
    return describe_training(name, 1, SEQ_LEN)


def paper(name: str, batch: int, on: Machine, overlaps: bool = True) -> PaperScheme:
    """The paper's scheme."""
    return PaperScheme(_model(name).with_batch(batch), on, overlaps)


def tflops(scheme: PaperScheme) -> float:
    """With recomputation, as the paper counts."""
    result = scheme.plan()
    return result.hardware_flops_per_second / 1e12 if result.fits else float("nan")


def ours(name: str, batch: int, on: Machine) -> float | None:
    """TFLOP/s of our scheme, counted as if it recomputed every block, to compare; None if it does not fit."""
    job = _model(name).with_batch(batch)
    result = plan(job, on)
    return job.tokens * job.hardware_flops_per_token / result.step_seconds / 1e12 if result.fits else None


def largest(gpu: str, host_gb: int, scheme: str) -> str:
    """Largest of the paper's models at batch 1."""
    on = machine(gpu, host_gb)

    def has_room(job: TrainingJob) -> bool:
        if not job.name.startswith("gpt3"):
            return False
        return not PaperScheme(job, on).missing() if scheme == "fuyou" else fits(job, on)

    largest = largest_model(_model, has_room)
    return largest.name if largest else "none"


def misses(predicted: float, published: float) -> str:
    """``+12%``."""
    return f"{predicted / published - 1:+.0%}"


def report_sizes() -> list[str]:
    lines = ["Largest model, batch 1 (5.2)", f"{'':4}{'GPU':10}{'host':>7}  {'published':14}{'predicted':12}{'':6}ours"]
    for gpu, host, published in SIZES:
        predicted = largest(gpu, host, "fuyou")
        if published is None:
            smaller = largest("rtx-4090", host, "fuyou")
            good = _model(predicted).parameters > _model(smaller).parameters
            text = f"> {smaller}"
        else:
            good, text = predicted == published, published
        lines.append(
            f"{'':4}{gpu:10}{host:>4} GB  {text:14}{predicted:12}{'' if good else 'MISS':6}{largest(gpu, host, 'ours')}"
        )
    return lines


def report_throughputs(rows: Sequence[Throughput]) -> list[str]:
    lines = [
        "Throughput in TFLOP/s, recomputation counted (5.3); ours as if it recomputed everything, to compare",
        f"{'':4}{'model':11}{'GPU':10}{'batch':>5}{'published':>11}{'predicted':>11}{'':7}{'ours':>7}  source",
    ]
    for row in rows:
        on = machine(row.gpu)
        predicted, own_scheme = tflops(paper(row.model, row.batch, on)), ours(row.model, row.batch, on)
        lines.append(
            f"{'':4}{row.model:11}{row.gpu:10}{row.batch:>5}{row.published:>11.0f}{predicted:>11.0f}"
            f"{misses(predicted, row.published):>7}{'no fit' if own_scheme is None else format(own_scheme, '.0f'):>7}"
            f"  {row.where}"
        )
    return lines


def report_overlap() -> list[str]:
    lines = [
        "Throughput with optimizer and backward pass overlapped, over that without (5.4, RTX 4090). Without it, Adam",
        "runs during its I/O (4.4), and as many activations are swapped as is best for stages one after the other",
        f"{'':4}{'model':11}{'batch':>5}{'published':>11}{'predicted':>11}",
    ]
    for name, batch, published in OVERLAP:
        on = machine("rtx-4090")
        # In tokens: what is swapped differs, and with it the FLOPs that are done.
        gain = paper(name, batch, on).plan().tokens_per_second
        gain /= paper(name, batch, on, overlaps=False).plan().tokens_per_second
        lines.append(f"{'':4}{name:11}{batch:>5}{published:>10.2f}x{gain:>10.2f}x{misses(gain, published):>7}")
    return lines


def report_swaps() -> list[str]:
    lines = ["Swap coefficient, 13B on an A100 (5.6)", f"{'':4}{'batch':>5}{'published':>11}{'predicted':>11}"]
    for batch, swaps in SWAPS:
        coefficient = paper("gpt3-13b", batch, machine("a100-80g")).swap().coefficient
        good = (coefficient > 0) == swaps
        lines.append(f"{'':4}{batch:>5}{'above 0' if swaps else '0':>11}{coefficient:>11.2f}{'' if good else '  MISS'}")
    return lines


def tokens_per_dollar(drives: int) -> tuple[float, float]:
    """Return tokens per second for 1,000 dollars of GPU and drives, and with the server: 175B on an RTX 4090."""
    rate = paper("gpt3-175b", 16, machine("rtx-4090", drives=drives)).plan().tokens_per_second
    dollars = GPU_DOLLARS["rtx-4090"] + drives * DRIVE_DOLLARS
    return rate / dollars * 1000, rate / (dollars + SERVER_DOLLARS) * 1000


def report_prices() -> list[str]:
    lines = ["Tokens/s per 1,000 dollars, 175B on an RTX 4090, batch 16 (5.7, figure 10: most with 6 drives)",
             f"{'':4}{'drives':>6}{'GPU and drives':>16}{'with the server':>17}"]  # fmt: skip
    for drives in DRIVE_COUNTS:
        parts, whole = tokens_per_dollar(drives)
        lines.append(f"{'':4}{drives:>6}{parts:>16.2f}{whole:>17.2f}")
    return lines


@click.command()
def main() -> None:
    """Print published figures, predictions, and by how much they differ."""
    on = machine("a100-80g")
    click.echo(
        f"Rates: blocks of a transformer at {on.rates.flops_per_second / 1e12:.0f} TFLOP/s on an A100 and "
        f"{machine('rtx-4090').rates.flops_per_second / 1e12:.0f} on an RTX 4090;\n"
        f"{DRIVES} drives, reading {on.rates.read_bytes_per_second / 1e9:.1f} or writing "
        f"{on.rates.write_bytes_per_second / 1e9:.1f} GB/s together; Adam {ADAM / 1e9:.1f} G parameters/s.\n"
        "Sources are in this script and in configs/."
    )
    for part in (report_sizes(), report_throughputs(THROUGHPUTS), report_overlap(), report_swaps(), report_prices()):
        click.echo("\n" + "\n".join(part))


if __name__ == "__main__":
    main()
