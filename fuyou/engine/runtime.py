"""Buffers, workers and the schedule of a run, made for a size of batch, and made again for a larger one."""

from dataclasses import replace
from typing import NamedTuple

from common.store import Store
from common.store.folders import SCRATCH
from fuyou.checkpoint.commits import Commits
from fuyou.checkpoint.run_files import RunFiles
from fuyou.config import EngineConfig
from fuyou.layout.model_layout import ModelLayout, most_of_a_kind
from fuyou.layout.record import RecordExtents
from fuyou.model.open_model import OpenModel
from fuyou.model.recompute.policy import ActivationPlanner
from fuyou.model.recompute.replay import BlockReplay
from fuyou.optimizer.process.client import OptimizerLink
from fuyou.runtime.accounting import Accounting, Bytes, IoCounter
from fuyou.runtime.data_plane.buffers import Buffers
from fuyou.runtime.data_plane.data_plane import DataPlane
from fuyou.runtime.data_plane.optimizer_handlers import OptimizerHandlers
from fuyou.runtime.data_plane.rank_handlers import RankHandlers
from fuyou.runtime.data_plane.stored_records import Scratch, StoredRecords
from fuyou.runtime.device import Device
from fuyou.runtime.executor import Handler
from fuyou.runtime.ranks import ClusterTopology
from fuyou.schedule.batch import ENGINE_LOSS, Batch, BatchShape, LossInputs
from fuyou.schedule.memory_plan import MemoryPlan
from fuyou.schedule.memory_planner import MemoryPlanner
from fuyou.schedule.scheduler import Scheduler
from fuyou.schedule.tasks import Op, StepList


class Room(NamedTuple):
    """What a batch needs, or buffers have room for."""

    rows: int
    seq_len: int
    images: bool = False
    padded: bool = False  # Whether an ``attention_mask`` hides tokens
    outputs: int = 0  # As in :class:`fuyou.schedule.batch.LossInputs`
    reference: bool = False


class Runtime:
    """Plans memory at once; allocates and starts everything in :meth:`open`.

    Args:
        link: the optimizer process, up.
    """

    def __init__(
        self,
        options: EngineConfig,
        model: OpenModel,
        layout: ModelLayout,
        device: Device,
        limits: tuple[int, int],
        link: OptimizerLink,
        topology: ClusterTopology | None = None,
    ):
        self._options = options
        self._device = device
        self._layout = layout
        self.link: OptimizerLink | None = link
        self._topology = topology
        self._deferred = options.update_policy.deferred(layout)
        self._keeping = ActivationPlanner(
            model.stack,
            "cpu" if device.shares_host_memory else "cuda",
            options.precision.dtype,
            0 if layout.orders else options.saved_activations,
        )
        host_limit, device_limit = limits
        self._planner = MemoryPlanner(
            self._layout,
            model.config,
            device_limit,
            host_limit,
            device.shares_host_memory,
            deferred=most_of_a_kind(layout, self._deferred),
            speculative=options.update_policy.speculative,
            host_cache=options.host_cache,
            saving_layers=len(self._keeping.layers),
            saved_bytes=lambda batch: self._keeping.saved(batch.micro_rows, batch.columns).nbytes,
        )
        self._plane: DataPlane | None = None
        self.ranks: RankHandlers  # Once it is open, of several ranks
        self._store: Store | None = None
        self.memory_plan: MemoryPlan
        self.scheduler: Scheduler
        self.recomputations: BlockReplay
        self.accounting: Accounting
        self.io = IoCounter(self._io_now)

    def plan(self, room: Room) -> None:
        """Divide the budgets for batches of this size.

        Raises:
            UserError: if they do not hold what a step needs.
        """
        before = self._planner.layout
        self._planner.layout = replace(
            before, images=before.images or room.images, padded=before.padded or room.padded
        )
        try:
            memory = self._options.memory
            loss = LossInputs(room.outputs, room.reference)
            self.memory_plan = self._planner.plan(
                room.rows, room.seq_len, memory.micro_batch, loss, memory.chunk
            )
        except BaseException:
            self._planner.layout = before
            raise

    @property
    def room(self) -> Room:
        """Largest batches that the memory plan is for."""
        batch = self.memory_plan.batch
        layout = self._planner.layout
        return Room(
            batch.rows, batch.seq_len, layout.images, layout.padded, batch.loss.outputs, batch.loss.reference
        )

    def attach(self, files: RunFiles, extents: list[RecordExtents]) -> None:
        """Train what is in these files; what was read and written before is not counted as training's.

        Args:
            extents: each record's place in the store.
        """
        self._files = files
        self._store = files.store
        self._extents = extents
        self.io.begin()

    def open(self, commits: Commits) -> None:
        """Allocate everything and start the workers, by the memory plan."""
        options = self._options
        plan = self.memory_plan
        store = self._files.store
        self._commits = commits
        if self.link is None:
            self.link = OptimizerLink()
            self.link.wait_until_up()
        size = plan.batch.micro_rows, plan.batch.columns
        recomputation = self._keeping.recomputation(*size)
        operators = self._keeping.saved(*size).operators
        if plan.batch.chunks > 1:  # nothing but keys and values is saved
            recomputation = recomputation.saving_nothing()
            operators = ()
        self.recomputations = BlockReplay(recomputation.layers, operators, plan.saved_bytes)
        self.scheduler = Scheduler(
            self._layout,
            plan.counts,
            slot=commits.state.slot,
            deferred=self._deferred,
            speculate=options.update_policy.speculative,
            resident=plan.resident,
            recomputation=recomputation,
            direct_reads=options.store.direct_reads,
        )
        buffers = Buffers(self._layout, plan, self._device, self.link.shared_fd)
        folders = [folder / SCRATCH for folder in store.directories]
        spills = plan.spills_gradients(self._layout, options.update_policy.held(self._layout))
        scratch = Scratch(buffers, folders, spills)
        stored = StoredRecords(store, self._extents, commits.sums, commits.missed)
        locks = self._files.lock.descriptors
        optimizer = OptimizerHandlers(self.link, stored, commits.update_of, plan.resident, locks)
        handlers: dict[Op, Handler] = {Op.COMMIT: commits.commit}
        if self._topology is not None:
            self.ranks = RankHandlers(buffers, self._topology)
            handlers |= self.ranks.handlers()
        self._plane = DataPlane(buffers, stored, optimizer, scratch, handlers)
        self.accounting = Accounting(self._plane)

    @property
    def plane(self) -> DataPlane:
        assert self._plane is not None
        return self._plane

    @property
    def is_open(self) -> bool:
        return self._plane is not None

    def reopen(self) -> None:
        """Make all buffers again, by the memory plan. Nothing may be pending."""
        self.close()
        self.open(self._commits)
        self.plane.buffers.wait_until_touched()

    def batch_shape(self, rows: int, seq_len: int, loss: LossInputs = ENGINE_LOSS) -> BatchShape:
        """Return a batch as the schedule sees it."""
        plan = self.memory_plan
        chunk = plan.batch.chunk
        return plan.batch_shape(Batch(rows, seq_len, min(rows, plan.batch.micro_rows), loss, chunk=chunk))

    def submit(self, tasks: StepList) -> None:
        """Let the lanes run ``tasks``, and note what they will cost."""
        self.io.submitted(tasks)
        self.plane.executor.submit(tasks.tasks)
        self._commits.submitted(tasks.tasks)
        self.accounting.watch(tasks)

    def close(self) -> None:
        """Give all buffers back. What is pending must have been flushed; what is not is lost."""
        if self._plane is not None:
            self._plane.close()
            self.io.ended(Bytes(*self._plane.io_bytes()))
            self._plane = None
        if self.link is not None:
            self.link.close()
            self.link = None

    def _io_now(self) -> Bytes:
        moved = Bytes() if self._store is None else Bytes(self._store.bytes_read, self._store.bytes_written)
        return moved if self._plane is None else moved.plus(Bytes(*self._plane.io_bytes()))
