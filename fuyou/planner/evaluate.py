"""What one way of running a step costs: buffers counted, tasks listed, the list run on a clock.

A list of hundreds of thousands of tasks takes seconds to simulate. For comparing candidates, micro-batches are merged
until few enough are left: the same bytes and FLOPs in fewer tasks, buffers of activations in proportion.
"""

from dataclasses import dataclass, replace

from common.errors import UserError
from fuyou.deferral import interleaved
from fuyou.memory_plan import Batch, MemoryPlan, MemoryPlanner
from fuyou.planner.machine import Machine
from fuyou.planner.workload import Workload
from fuyou.simulator import Rates, simulate
from fuyou.tasks import Resource, StepList

#: Visits times micro-batches in a step that is only simulated to compare.
_MOST_TASKS = 640
#: Steps until one is like the next: two, and with deferred updates one more.
_STEPS = 3


@dataclass(frozen=True)
class Candidate:
    """One way of running a step."""

    micro_rows: int | None
    """None takes what the memory plan prefers."""
    deferred_fraction: float
    # Activations to keep beyond block inputs belong here, as one more dimension to search.


@dataclass(frozen=True)
class Evaluation:
    """What a candidate comes to."""

    candidate: Candidate
    memory: MemoryPlan
    step_seconds: float
    busy: dict[Resource, float]
    """Seconds of work in one step."""
    tasks: StepList
    """Of a step in the steady state, with its times if it was simulated."""

    @property
    def bound_seconds(self) -> float:
        """No schedule makes the step shorter than this."""
        return max(self.busy.values())


class Evaluator:
    """Evaluates candidates for one workload on one machine; each only once."""

    def __init__(self, workload: Workload, machine: Machine):
        self.workload = workload
        self.machine = machine
        self._known: dict[tuple[Candidate, bool], Evaluation | UserError] = {}

    def evaluate(self, candidate: Candidate, *, merged: bool = True) -> Evaluation:
        """Simulate ``candidate``; with ``merged`` micro-batches it is quick and a little off.

        Raises:
            UserError: it does not fit into memory; says how much would.
        """
        key = (candidate, merged)
        if key not in self._known:
            try:
                self._known[key] = self._evaluate(candidate, merged)
            except UserError as error:
                self._known[key] = error
        result = self._known[key]
        if isinstance(result, UserError):
            raise result
        return result

    def fits(self, candidate: Candidate) -> bool:
        """Whether it fits into memory."""
        try:
            self.memory(candidate)
        except UserError:
            return False
        return True

    def deferred(self, candidate: Candidate) -> frozenset[int]:
        """Records whose updates wait for the next forward pass."""
        return interleaved(self.workload.shape, 1.0 if self.workload.clips else candidate.deferred_fraction)

    def memory(self, candidate: Candidate) -> MemoryPlan:
        """The buffers that ``candidate`` gets.

        Raises:
            UserError: they do not fit; says how much would.
        """
        workload, machine = self.workload, self.machine
        planner = MemoryPlanner(
            workload.shape, workload.config, machine.device_bytes, machine.host_bytes, machine.cpu,
            len(self.deferred(candidate)),
        )  # fmt: skip
        return planner.plan(workload.rows, workload.seq_len, candidate.micro_rows)

    def _evaluate(self, candidate: Candidate, merged: bool) -> Evaluation:
        memory = self.memory(candidate)
        plan = merge_micro_batches(memory, len(self.workload.shape.blocks)) if merged else memory
        simulation, tasks = simulate(
            self.workload.shape, plan, self.machine.rates, self.deferred(candidate), steps=_STEPS,
            hold=self.workload.clips,
        )  # fmt: skip
        return Evaluation(
            candidate, memory, simulation.step_seconds(), busy_seconds(tasks, self.machine.rates), tasks
        )


def merge_micro_batches(plan: MemoryPlan, layers: int) -> MemoryPlan:
    """The same step in fewer, larger micro-batches, however large a device they would take."""
    several, counts = plan.batch.micro_batches, plan.counts
    wanted = max(1, _MOST_TASKS // (2 * layers))
    if several < 2 * wanted:
        return plan
    batch = Batch(plan.batch.rows, plan.batch.seq_len, -(-plan.batch.rows // wanted))
    factor = several / batch.micro_batches
    everything = (layers + 2) * batch.micro_batches + 2
    spills = bool(counts.host_activations)
    merged = replace(
        counts,
        device_activations=max(4, int(counts.device_activations / factor)) if spills else everything,
        host_activations=max(2, int(counts.host_activations / factor)) if spills else 0,
        ssd_activations=everything if counts.ssd_activations else 0,
    )
    return replace(plan, batch=batch, counts=merged, activation_bytes=round(plan.activation_bytes * factor))


def busy_seconds(tasks: StepList, rates: Rates) -> dict[Resource, float]:
    """Seconds for which the tasks of a step keep each resource busy: no step is shorter than the largest of them."""
    moved = dict.fromkeys(Resource, 0.0)
    for task in tasks.tasks:
        moved[task.op.resource] += task.flops if task.op.resource is Resource.GPU else task.nbytes
    return {
        Resource.GPU: moved[Resource.GPU] / rates.flops_per_second,
        Resource.HOST_TO_DEVICE: moved[Resource.HOST_TO_DEVICE] / rates.upload_bytes_per_second,
        Resource.DEVICE_TO_HOST: moved[Resource.DEVICE_TO_HOST] / rates.download_bytes_per_second,
        Resource.SSD: tasks.ssd_read_bytes() / rates.read_bytes_per_second
        + tasks.ssd_written_bytes() / rates.write_bytes_per_second,
        Resource.ADAM: moved[Resource.ADAM] / rates.adam_parameters_per_second,
    }
