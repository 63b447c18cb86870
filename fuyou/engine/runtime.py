"""What runs the steps: buffers, workers and the schedule, made for a size of batch, and made again for a larger one."""

from dataclasses import replace
from pathlib import Path

from common.store import IoThrottle, Store
from common.store.migration import SCRATCH
from fuyou.checkpoint.commits import Commits
from fuyou.checkpoint.run_files import RunFiles
from fuyou.config import EngineConfig
from fuyou.layout.model_layout import BatchShape, ModelLayout
from fuyou.layout.record import RecordExtents
from fuyou.model.open_model import OpenModel
from fuyou.optimizer.client import OptimizerLink
from fuyou.ranks.topology import ClusterTopology
from fuyou.recompute.policy import ActivationPlanner
from fuyou.recompute.replay import Recomputations
from fuyou.runtime.accounting import Accounting
from fuyou.runtime.data_plane import DataPlane
from fuyou.runtime.devices import Device
from fuyou.runtime.io_counter import Bytes, IoCounter
from fuyou.runtime.trace import StepTrace
from fuyou.schedule.memory_plan import Batch, MemoryPlan, MemoryPlanner
from fuyou.schedule.scheduler import Scheduler
from fuyou.schedule.tasks import StepList


class Runtime:
    """Plans memory at once; allocates and starts everything in :meth:`attach`.

    Args:
        options: of the run.
        model: that is trained.
        shape: its records, this rank's part of them.
        device: where blocks compute.
        limits: bytes of host and device memory that the run may take.
        link: the optimizer process, up.
        topology: the other ranks, if there are any.
        throttle: makes the drives look slower.
    """

    def __init__(
        self,
        options: EngineConfig,
        model: OpenModel,
        shape: ModelLayout,
        device: Device,
        limits: tuple[int, int],
        link: OptimizerLink,
        topology: ClusterTopology | None = None,
        throttle: IoThrottle | None = None,
    ):
        self._options, self._device, self._shape = options, device, shape
        self.link: OptimizerLink | None = link
        self._topology, self.throttle = topology, throttle
        self._deferred = options.deferred(shape)
        self._keeping = ActivationPlanner(
            model.stack, "cpu" if device.shares_host_memory else "cuda", options.precision.dtype,
            options.kept_activations,
        )  # fmt: skip
        host_limit, device_limit = limits
        self._planner = MemoryPlanner(
            self._shape,
            model.config,
            device_limit,
            host_limit,
            device.shares_host_memory,
            deferred=len(self._deferred),
            speculative=options.speculates,
            host_cache=options.host_cache,
            kept_layers=len(self._keeping.layers),
            kept_bytes=lambda batch: self._keeping.keep(batch.micro_rows, batch.seq_len).nbytes,
        )
        self._plane: DataPlane | None = None
        self._store: Store | None = None
        self._trace: StepTrace | None = None
        self.memory_plan: MemoryPlan
        self.scheduler: Scheduler
        self.recomputations: Recomputations
        self.accounting: Accounting
        self.io = IoCounter(self._io_now)

    def plan(self, rows: int, seq_len: int, images: bool = False) -> None:
        """Divide the budgets for batches of this size, with ``images`` or without.

        Raises:
            UserError: they do not hold what a step needs.
        """
        if images:
            self._planner.shape = replace(self._planner.shape, images=True)
        self.memory_plan = self._planner.plan(rows, seq_len, self._options.micro_batch)

    def attach(self, files: RunFiles, extents: list[RecordExtents]) -> None:
        """Train what is in these files; what was read and written before is not counted as training's.

        Args:
            extents: each record's place in the store.
        """
        self._files, self._store, self._extents = files, files.store, extents
        self.io.begin()

    def open(self, commits: Commits) -> None:
        """Allocate everything and start the workers, by the memory plan."""
        options, plan, store = self._options, self.memory_plan, self._files.store
        self._commits = commits
        if self.link is None:
            self.link = OptimizerLink()
            self.link.wait_until_up()
        recomputation = self._keeping.recomputation(plan.batch.micro_rows, plan.batch.seq_len)
        self.recomputations = Recomputations(
            recomputation.layers,
            self._keeping.keep(plan.batch.micro_rows, plan.batch.seq_len).operators,
            plan.kept_bytes,
        )
        self.scheduler = Scheduler(
            self._shape, plan.counts, single_slot=options.single_slot, slot=commits.state.slot,
            deferred=self._deferred, hold=options.max_grad_norm is not None, speculate=options.speculates,
            resident=plan.resident, recomputation=recomputation,
        )  # fmt: skip
        self._plane = DataPlane(
            self._shape, plan, self._device, store, self._extents, commits.state.slots, self.link,
            [folder / SCRATCH for folder in store.directories], commits.commit, commits.update_of,
            spill_gradients=plan.spills_gradients(self._shape, options.held(self._shape)),
            resident=plan.resident, throttle=self.throttle, topology=self._topology, locks=self._files.lock.descriptors,
            sums=commits.sums, missed=commits.missed,
        )  # fmt: skip
        self.accounting = Accounting(self._plane, self._trace)

    @property
    def plane(self) -> DataPlane:
        """Buffers and workers, which are there."""
        assert self._plane is not None
        return self._plane

    @property
    def is_open(self) -> bool:
        """Whether buffers and workers are there."""
        return self._plane is not None

    def fit(self, rows: int, seq_len: int, images: bool = False) -> None:
        """Make sure that there are buffers in which such a batch has room. Nothing may be pending where there are not.

        Raises:
            UserError: the budgets do not hold it.
        """
        if self.fits(rows, seq_len, images):
            return
        planned = self.memory_plan.batch
        self.plan(max(rows, planned.rows), max(seq_len, planned.seq_len), images)
        self.close()
        self.open(self._commits)

    def fits(self, rows: int, seq_len: int, images: bool = False) -> bool:
        """Whether there are buffers in which such a batch has room."""
        planned = self.memory_plan.batch
        counted = self._planner.shape.images or not images
        return self.is_open and rows <= planned.rows and seq_len <= planned.seq_len and counted

    def batch_shape(self, rows: int, seq_len: int) -> BatchShape:
        """How the schedule sees a batch."""
        plan = self.memory_plan
        split = Batch(rows, seq_len, min(rows, plan.batch.micro_rows))
        return BatchShape(split.micro_batches, plan.activation_bytes, split.mean_tokens, plan.kept_bytes)

    def submit(self, tasks: StepList) -> None:
        """Let the lanes run ``tasks``, and note what they will cost."""
        self.io.submitted(tasks)
        self.plane.executor.submit(tasks.tasks)
        self._commits.submitted(tasks.tasks)
        self.accounting.watch(tasks)

    def keep_trace(self) -> None:
        """From the next step on, keep what happens in the newest one."""
        self._trace = StepTrace(self._shape.records)
        if self._plane is not None:
            self.accounting = Accounting(self._plane, self._trace)

    def write_trace(self, path: Path) -> None:
        """Write the newest step's tasks, which must have come to their end.

        Raises:
            UserError: no step was taken since :meth:`keep_trace`, or the file cannot be written.
        """
        self.accounting.take()
        (self._trace or StepTrace([])).write(path)

    def close(self) -> None:
        """Give all buffers back. What is pending must have been flushed; what is not is lost."""
        if self._plane is not None:
            self._plane.close()
            self.io.ended(self._plane.io_bytes())
            self._plane = None
        if self.link is not None:
            self.link.close()
            self.link = None

    def _io_now(self) -> Bytes:
        """What the store and the optimizer process there are have moved."""
        parts = [(store.bytes_read, store.bytes_written) for store in (self._store,) if store is not None]
        parts += [plane.io_bytes() for plane in (self._plane,) if plane is not None]
        return sum(read for read, _ in parts), sum(written for _, written in parts)
