"""Plan a run with Fuyou's own scheme and equations, and compare plans with every number that the paper's text gives.

Fuyou: Liao et al. 2024, "Adding NVMe SSDs to Enable and Accelerate 100B Model Fine-tuning on a Single GPU",
arXiv:2403.06504; its figures are in published/fuyou.toml.

    python scripts/reproduce_fuyou.py                                                 # its figures (--json: as JSON)
    python scripts/reproduce_fuyou.py --model gpt3-13b --batch 32                     # one run on the paper's server
    python scripts/reproduce_fuyou.py --model llama-7b --batch 16 --seq-len 2048 --gpu h100 --host-memory 256 \\
        --drive samsung-990-pro-4tb --drives 4 --drives-limit inf                     # any model and machine

Differences of the paper's scheme from ours: 14 bytes of states and parameters per parameter, of which 30 move in a step
(equations 4 and 7); one micro-batch per step; no update is deferred, and a step begins when the last update of the one
before is on SSD; parameters are not cached from step to step; whole blocks are the unit of transfer and update; states
have one slot. How many activations are saved follows equations 1 to 12. The task list is the scheduler's.
"""

import json
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any, NamedTuple

import click

from common.errors import UserError
from common.hardware.presets import drive_preset, gpu_preset
from common.units import format_bytes
from fuyou.layout.model_layout import BufferCounts, ModelLayout, Phase
from fuyou.layout.record import Precision
from fuyou.planner import Machine, Plan, TrainingJob, describe_training, preset_machine
from fuyou.planner.evaluate import Evaluator, busy_seconds
from fuyou.planner.search import missing_space
from fuyou.planner.simulator import Simulation, Simulator, TaskRates
from fuyou.schedule.batch import Batch, BatchShape
from fuyou.schedule.memory_plan import MemoryPlan
from fuyou.schedule.scheduler import Scheduler
from fuyou.schedule.tasks import Op, StepList, Task

DATA = tomllib.loads(Path(__file__).with_name("published").joinpath("fuyou.toml").read_text(encoding="utf-8"))

# -- the paper's scheme -----------------------------------------------------------------------------------------------

# Whole blocks that fill device memory: parameters and fp16 gradients, two of each, so that one moves while the other
# computes. (With three or five, the largest model on an RTX 4090 would not be the one that the paper names.)
DEVICE_BUFFERS = BufferCounts(
    device_blocks=2, device_block_gradients=2, host_blocks=5, host_block_gradients=2
)
# fp32 host buffers of whole blocks: the optimizer is "based on ZeRO-Infinity's", which holds four tensors of a group
# (parameter, gradient, mean, variance), for a group that is read, one that is updated, and one that is written.
STATE_BUFFERS = 3 * 4
HOST_OVERHEAD_BYTES = 8 << 30  # Two Python processes with CUDA's libraries, and the system
# Bytes per token and hidden unit that one block saves for its backward pass: Korthikanti et al. 2022
# (arXiv:2205.05198), equation 1, attention by a fused kernel.
SAVED_BYTES = 34
# Table 2: (output in units of b s h elements, FLOPs in units of b s h^2) by their quotient, which is equation 12's
# benefit of a swap: first the layer of high priority.
LINEAR_LAYERS = sorted(((3, 6.0), (1, 2.0), (4, 8.0), (1, 8.0)), key=lambda layer: -layer[1] / layer[0])
_CHUNKS_PER_GROUP = 2  # What is decayed and what is not are updated one after the other
_PREFETCH = 2  # Layers by which a swapped activation comes back before it is used


class PaperPrecision(Precision):
    """fp16 parameters next to fp32 masters and moments."""

    def state_nbytes(self, elements: int) -> int:
        """Return 12 bytes for each element."""
        return 12 * elements


class Swap(NamedTuple):
    """Activations that are saved beyond block inputs: the paper's D_f - D_start."""

    linears: tuple[int, ...] = (0, 0, 0, 0)  # Blocks that save the output of each of table 2's layers
    nbytes: int = 0  # Bytes of a step
    saved_flops: float = 0.0  # FLOPs that a step need not recompute
    coefficient: float = 0.0  # Fraction of all activations inside blocks (section 5.6)


class Terms(NamedTuple):
    """Seconds of a step's activities, as the paper's equations estimate them."""

    forward_compute: float
    forward_link: float  # (3)
    forward_drives: float  # (4)
    backward_compute: float  # (8)
    backward_link: float  # (6)
    backward_drives: float  # (7), or without overlap the part of the backward pass
    adam: float
    optimizer_drives: float = 0.0  # Without overlap: the part of (7) that follows

    @property
    def step(self) -> float:
        """T_iter by equations 1, 2, and 5; without overlap, the optimizer's stage follows the backward pass."""
        backward = (self.backward_compute, self.backward_link, self.backward_drives)
        optimizer = (self.adam, self.optimizer_drives)
        last = max(*backward, self.adam) if not self.optimizer_drives else max(backward) + max(optimizer)
        return max(self.forward_compute, self.forward_link, self.forward_drives) + last

    @property
    def benefit(self) -> float:
        """T_max by equation 9: seconds that a step can gain at most."""
        return self.backward_compute - max(self.backward_link, self.backward_drives)


@dataclass(frozen=True)
class PaperScheme:
    """A job on a machine, as the paper runs it."""

    job: TrainingJob
    machine: Machine
    overlaps: bool = True  # Whether updates run during the backward pass (section 4.3)
    fixed_swap: Swap | None = None  # Activations to swap; None: those of equations 1 to 12

    @property
    def layout(self) -> ModelLayout:
        layout = self.job.layout
        precision = PaperPrecision(layout.precision.dtype)
        records = tuple(replace(record, precision=precision) for record in layout.records)
        return replace(layout, records=records, precision=precision)

    @property
    def _groups(self) -> int:
        # Blocks that the optimizer works on at once: with two, updates overlap with I/O. Section 4.4 has two without
        # overlap. Section 4.3 says the same with it, but its throughputs say one: with two, 175B on an RTX 4090 would
        # reach 99 TFLOP/s, not 86.
        return 1 if self.overlaps else 2

    @cached_property
    def rates(self) -> TaskRates:
        return Evaluator(self.job, self.machine).rates

    @property
    def elements(self) -> int:
        """Number of all parameters, padding included: the paper's p."""
        return sum(record.numel for record in self.job.layout.records)

    @property
    def layers(self) -> int:
        return len(self.job.layout.blocks)

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
        return 4 * 2 * self.job.layout.block_elements + SAVED_BYTES * self.job.tokens * self.hidden

    @property
    def buffer_host_bytes(self) -> int:
        """Bytes of page-locked buffers, which PyTorch rounds up to a power of two, and of the processes."""
        in_16_bits = DEVICE_BUFFERS.host_blocks + DEVICE_BUFFERS.host_block_gradients
        in_fp32 = 1 << (4 * self.job.layout.block_elements - 1).bit_length()
        return STATE_BUFFERS * in_fp32 + in_16_bits * in_fp32 // 2 + HOST_OVERHEAD_BYTES

    @property
    def activations_on_host(self) -> bool:
        """Whether activations stay in host memory, where there is room (section 4.4)."""
        inputs = (self.layers + 1) * self.activation_bytes
        return self.buffer_host_bytes + inputs + self.swap.nbytes <= self.machine.host_bytes

    def missing(self) -> tuple[str, ...]:
        """Return sentences that say what the machine lacks."""
        memory = (
            ("device", self.device_bytes, self.machine.device_bytes),
            ("host", self.buffer_host_bytes, self.machine.host_bytes),
        )
        lacks = [
            f"It takes {format_bytes(needed)} of {what} memory, and there are {format_bytes(there)}."
            for what, needed, there in memory if needed > there
        ]  # fmt: skip
        return (*lacks, *missing_space(14 * self.elements, self.machine))

    # -- equations 1 to 12 --------------------------------------------------------------------------------------------

    @cached_property
    def swap(self) -> Swap:
        """The activations to swap: the first of table 2's order that make T_iter least within equation 11."""
        if self.fixed_swap is not None:
            return self.fixed_swap
        allowed = [swap for swap in self.swaps() if self.start_bytes + swap.nbytes <= self.most_swapped]
        return min([Swap(), *allowed], key=lambda swap: self.terms(swap).step)

    def swaps(self) -> Iterator[Swap]:
        """Yield what may be swapped, from the output of one layer of one block to those of all."""
        unit = self.job.tokens * self.hidden
        everything = self.layers * sum(width for width, _ in LINEAR_LAYERS)
        blocks, units, flops = [0] * len(LINEAR_LAYERS), 0, 0.0
        for number, (width, cost) in enumerate(LINEAR_LAYERS):
            for _ in range(self.layers):
                blocks[number] += 1
                units += width
                flops += cost * unit * self.hidden
                yield Swap(tuple(blocks), 2 * units * unit, flops, units / everything)

    @property
    def start_bytes(self) -> int:
        """The paper's D_start: the input of each block."""
        return self.layers * self.activation_bytes

    @property
    def most_swapped(self) -> float:
        """The paper's D_max, by equation 10. Where it is less than D_start, nothing is swapped beyond block inputs."""
        return self.terms(Swap()).benefit * min(self._bandwidths)

    @property
    def _bandwidths(self) -> tuple[float, float, float]:
        """Bytes per second of the link, and of all drives read and written."""
        rates = self.rates
        link = min(rates.upload_bytes_per_second, rates.download_bytes_per_second)
        return link, rates.read_bytes_per_second, rates.write_bytes_per_second

    def terms(self, swap: Swap) -> Terms:
        """Return the terms of equations 2 to 8.

        Without overlap, for which the paper gives no equation, the optimizer's stage has separate ones, and
        gradients wait on SSD for it (section 4.3).
        """
        (link, read, write), p = self._bandwidths, float(self.elements)
        moved = swap.nbytes + self.start_bytes  # D_f
        compute = 2.0 * self.job.block_parameters * self.job.tokens / self.rates.flops_per_second
        recompute = compute - swap.saved_flops / self.rates.flops_per_second  # RC(D_f)
        states = 14 * p / read + 14 * p / write
        waiting = 2 * p / read + 2 * p / write  # without overlap: parameters come, gradients leave
        return Terms(
            compute, max(2 * p, moved) / link, 2 * p / read + moved / write, 2 * compute + recompute,
            (2 * p + moved) / link, moved / read + (states if self.overlaps else waiting),
            p / self.rates.adam_parameters_per_second, 0.0 if self.overlaps else states,
        )  # fmt: skip

    def zero_infinity_seconds(self) -> float:
        """Return the seconds of ZeRO-Infinity's step, whose activities follow each other (section 3.2, figure 2a).

        Gradients wait on SSD in fp32; block inputs go through pageable memory.
        """
        (link, read, write), p = self._bandwidths, float(self.elements)
        parameters = 2 * (2 * p / read + 2 * p / link)  # both passes
        gradients = 2 * p / link + 4 * p / write
        optimizer = 16 * p / read + p / self.rates.adam_parameters_per_second + 14 * p / write
        activations = 2 * self.start_bytes / (1e9 * DATA["pageable"])
        return parameters + gradients + optimizer + activations + 4 * self.terms(Swap()).forward_compute

    # -- the task list ------------------------------------------------------------------------------------------------

    def memory(self) -> MemoryPlan:
        """Return the buffers as the scheduler counts them: one micro-batch, whole blocks."""
        job = self.job
        inputs = self.layers + 3
        counts = replace(
            DEVICE_BUFFERS, device_activations=6, host_activations=inputs if self.activations_on_host else 6,
            ssd_activations=0 if self.activations_on_host else inputs,
        )  # fmt: skip
        largest = max(record.numel for record in job.layout.records)
        host = self.buffer_host_bytes
        if self.activations_on_host:
            host += inputs * self.activation_bytes + self.swap.nbytes
        return MemoryPlan(
            counts, Batch(job.rows, job.seq_len, job.rows), _CHUNKS_PER_GROUP * self._groups, largest,
            self.activation_bytes, 0, job.seq_len, False, False, False, SAVED_BYTES * job.tokens * self.hidden,
            self.device_bytes, host,
        )  # fmt: skip

    def simulate(self, steps: int = 3) -> tuple[Simulation, StepList]:
        """Simulate consecutive steps; return also the tasks of the last one."""
        plan, layout = self.memory(), self.layout
        deferred = () if self.overlaps else [record.index for record in layout.records]
        scheduler = Scheduler(layout, plan.counts, deferred=deferred)
        batch = BatchShape(1, plan.activation_bytes, plan.batch.mean_tokens)
        lists = []
        for number in range(1, steps + 1):
            step = scheduler.training_step(number, batch, commit=False)
            self._add_swaps(step)
            if not self.overlaps:
                step.tasks += scheduler.flush(number, commit=False).tasks
            end = step.end
            assert end is not None
            step.tasks.remove(end)
            end.after = list(step.tasks)  # the next step begins when this one is over
            step.tasks.append(end)
            lists.append(step)
        simulator = Simulator(layout.records, self.rates, plan.ring_chunks, plan.chunk_elements)
        return simulator.run(lists), lists[-1]

    def _add_swaps(self, step: StepList) -> None:
        """Insert the traffic of swapped activations into a step's tasks, and subtract the recomputation they save."""
        unit = self.job.tokens * self.hidden
        nbytes, flops = [0] * self.layers, [0.0] * self.layers
        for (width, cost), blocks in zip(LINEAR_LAYERS, self.swap.linears, strict=True):
            for layer in range(blocks):
                nbytes[layer] += 2 * width * unit
                flops[layer] += cost * unit * self.hidden
        away: dict[int, Task] = {}
        # One block behind, or a block's input would queue behind what the last one saved
        leaving: list[Task] = []
        backward: list[Task] = []
        tasks: list[Task] = []
        for task in step.tasks:
            phase = task.visit.phase if task.visit else None
            block = (
                task.visit.layer
                if task.visit and phase in (Phase.BLOCK_FORWARD, Phase.BLOCK_BACKWARD)
                else None
            )
            swapped = 0 if block is None else nbytes[block]
            if block is not None and swapped and phase is Phase.BLOCK_BACKWARD:
                task.flops -= flops[block]
                back = [away[block], *backward[-_PREFETCH:][:1]]
                if not self.activations_on_host:
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
                if not self.activations_on_host:
                    leaving.append(_activation(Op.ACTIVATION_WRITE, leaving[:1], swapped, task))
                away[block] = leaving[-1]
        step.tasks = tasks

    @cached_property
    def plan(self) -> Plan:
        """The plan, as :func:`fuyou.planner.search` returns it for our scheme."""
        if missing := self.missing():
            return Plan(self.job, self.machine, missing=missing)
        memory = self.memory()
        simulation, tasks = self.simulate()
        return Plan(
            self.job, self.machine, memory=memory, saved_activation_bytes=self.swap.nbytes,
            step_seconds=simulation.step_seconds(), busy=busy_seconds(tasks, self.rates),
            read_bytes=tasks.ssd_read_bytes(), written_bytes=tasks.ssd_written_bytes(),
            saved_flops=self.swap.saved_flops,
            ssd_bytes=14 * self.elements + (not self.activations_on_host) * self.activation_bytes * (self.layers + 2),
        )  # fmt: skip

    def tflops(self, system: str = "Fuyou") -> float:
        """Return TFLOP/s with recomputation, as the paper counts; of ZeRO-Infinity, which recomputes every block."""
        if system == "Fuyou":
            return self.plan.hardware_flops_per_second / 1e12
        return self.job.tokens * self.job.hardware_flops_per_token / self.zero_infinity_seconds() / 1e12


def _activation(op: Op, after: list[Task], nbytes: int, of: Task) -> Task:
    return Task(op, after, nbytes=nbytes, step=of.step, record=of.record, visit=of.visit, micro=0)


# -- its figures -------------------------------------------------------------------------------------------------------

MODELS = [f"gpt3-{size}b" for size in (13, 33, 65, 135, 175, 276, 412, 805)]  # Table 4


class Row(NamedTuple):
    """A published value and the planned one."""

    figure: str
    case: str
    published: float | str
    planned: float | str

    def __str__(self) -> str:
        if isinstance(self.published, str) or isinstance(self.planned, str):
            return f"{self.figure:31}{self.case:62}{self.published:>12}{self.planned:>12}"
        error = self.planned / self.published - 1
        return f"{self.figure:31}{self.case:62}{self.published:12.4g}{self.planned:12.4g}{error:+7.0%}"


def server(
    gpu: str, host_memory: float = 768, drive: str = DATA["drive"], drives: int = DATA["drives"],
    drives_limit: float = DATA["drives_limit"], adam: float = DATA["adam"],
) -> Machine:  # fmt: skip
    """Return a machine: the server of table 3, unless other parts are named. Memory modules come in powers of two."""
    preset = gpu_preset(gpu)
    machine = preset_machine(preset, drive_preset(drive), drives, int(host_memory * 2**30))
    if preset.name in DATA["blocks"]:  # the paper's rate of a whole block
        flops = DATA["blocks"][preset.name] * 1e12
        machine = replace(machine, rates=replace(machine.rates, flops_per_second=flops), compute=None)
    read, write = (
        min(rate, drives_limit * 1e9)
        for rate in (machine.rates.read_bytes_per_second, machine.rates.write_bytes_per_second)
    )
    rates = replace(
        machine.rates,
        read_bytes_per_second=read,
        write_bytes_per_second=write,
        adam_parameters_per_second=adam * 1e9,
        host_seconds=(0.0, 0.0),
    )
    return replace(machine, rates=rates)


@cache
def _model(name: str) -> TrainingJob:
    return describe_training(name, 1, DATA["seq_len"])


def paper(name: str, batch: int, on: Machine, overlaps: bool = True) -> PaperScheme:
    """Return the paper's run of a model."""
    return PaperScheme(replace(_model(name), rows=batch), on, overlaps)


def tokens_per_dollar(drives: int) -> float:
    """Return tokens per second for 1,000 dollars of GPU and drives: 175B on an RTX 4090."""
    rate = paper("gpt3-175b", 16, server("rtx-4090", drives=drives)).plan.tokens_per_second
    return 1000 * rate / (DATA["gpu_dollars"] + drives * DATA["drive_dollars"])


def figures() -> Iterator[Row]:
    """Yield every value of published/fuyou.toml with its plan."""
    for gpu, host, published in DATA["sizes"]:
        on = server(gpu, host)
        names = [name for name in MODELS if not PaperScheme(_model(name), on).missing()]
        yield Row("4, largest model, batch 1", f"{gpu}, {host} GB", published, names[-1])
    for model, gpu, batch, system, published in DATA["throughputs"]:
        planned = paper(model, batch, server(gpu)).tflops(system)
        yield Row("5 and 6, TFLOP/s", f"{system}, {model}, {gpu}, batch {batch}", published, planned)
    for model, batch, published in DATA["overlap"]:
        # In tokens: what is swapped differs, and with it the FLOPs that are done.
        rates = [
            paper(model, batch, server("rtx-4090"), kind).plan.tokens_per_second for kind in (True, False)
        ]
        yield Row("7, over no overlap", f"{model}, batch {batch}", published, rates[0] / rates[1])
    for gpu, batch, published in DATA["pipelining"]:
        scheme = paper("gpt3-13b", batch, server(gpu), overlaps=False)
        planned = scheme.zero_infinity_seconds() / scheme.plan.step_seconds
        yield Row("8, no overlap, over ZeRO-Inf.", f"gpt3-13b, {gpu}, batch {batch}", published, planned)
    for batch, published in DATA["swaps"]:
        scheme = paper("gpt3-13b", batch, server("a100-80g"))
        yield Row(
            "9, swap coefficient", f"gpt3-13b, batch {batch}", published, f"{scheme.swap.coefficient:.2f}"
        )
        tried = [Swap(), *list(scheme.swaps())[9::10]]  # every tenth
        least = min(replace(scheme, fixed_swap=swap).plan.step_seconds for swap in tried)
        yield Row(
            "9, seconds over the least", f"gpt3-13b, batch {batch}", 1, scheme.plan.step_seconds / least
        )
    dollars = {drives: tokens_per_dollar(drives) for drives in DATA["drive_counts"]}
    yield Row("10a, best drives", ", ".join(f"{drives}: {rate:.1f}" for drives, rate in dollars.items()),
              DATA["best_drives"], max(dollars, key=lambda drives: dollars[drives]))  # fmt: skip


def describe(scheme: PaperScheme) -> Iterator[str]:
    """Yield lines about one run: the equations' terms, and the simulated step."""
    if not scheme.plan.fits:
        yield f"{scheme.job.name} does not fit: {' '.join(scheme.plan.missing)}"
        return
    swap, plan = scheme.swap, scheme.plan
    terms, most, start = scheme.terms(swap), scheme.most_swapped / 1e9, scheme.start_bytes / 1e9
    yield f"{scheme.job.name}, {scheme.job.rows} x {scheme.job.seq_len} tokens, on {scheme.machine.device}"
    seconds = {**terms._asdict(), "T_iter (1)": terms.step, "T_max (9)": scheme.terms(Swap()).benefit}
    yield from (f"  {name:18}{value:10.2f} s" for name, value in seconds.items())
    yield f"  D_start           {start:10.2f} GB"
    yield f"  D_max (10)        {most:10.2f} GB{', below D_start: only block inputs are swapped' * (most < start)}"
    yield f"  D_f (11)          {start + swap.nbytes / 1e9:10.2f} GB, swap coefficient {swap.coefficient:.2f}"
    yield f"  simulated step    {plan.step_seconds:10.2f} s, {scheme.tflops():.1f} TFLOP/s with recomputation"
    yield f"  tokens/s          {plan.tokens_per_second:10.1f}"
    for memory, nbytes in (
        ("device", plan.device_peak_bytes),
        ("host", plan.host_peak_bytes),
        ("SSD", plan.ssd_bytes),
    ):
        yield f"  {memory:18}{format_bytes(nbytes):>12}"


@click.command()
@click.option(
    "--model", help="Preset, configuration, or checkpoint to plan; without it, the paper's figures."
)
@click.option("--batch", default=1, show_default=True, help="Sequences of a step.")
@click.option("--seq-len", default=DATA["seq_len"], show_default=True)
@click.option("--gpu", default="rtx-4090", show_default=True)
@click.option("--host-memory", default=768.0, show_default=True, help="GiB.")
@click.option("--drive", default=DATA["drive"], show_default=True)
@click.option("--drives", default=DATA["drives"], show_default=True)
@click.option(
    "--drives-limit", default=DATA["drives_limit"], show_default=True, help="Most GB/s of all, or inf."
)
@click.option(
    "--adam", default=DATA["adam"], show_default=True, help="10^9 parameters per second that the CPU updates."
)
@click.option("--no-overlap", is_flag=True, help="Update after the backward pass.")
@click.option("--json", "as_json", is_flag=True, help="Print the figures as JSON.")
def main(model: str | None, batch: int, seq_len: int, no_overlap: bool, as_json: bool, **on: Any) -> None:
    """Print the plan of a run, or published figures next to planned ones."""
    if model is not None:
        try:
            scheme = PaperScheme(describe_training(model, batch, seq_len), server(**on), not no_overlap)
        except UserError as error:
            raise click.ClickException(str(error)) from error
        click.echo("\n".join(describe(scheme)))
    elif as_json:
        click.echo(json.dumps([row._asdict() for row in figures()], indent=1))
    else:
        click.echo(f"{'figure':31}{'case':62}{'published':>12}{'planned':>12}")
        for row in figures():
            click.echo(str(row))


if __name__ == "__main__":
    main()
