"""Opening a run: device, ranks, proof, model, memory plan and store, one after the other, and closing them again."""

import contextlib
import os
import warnings
from dataclasses import replace
from typing import Any

import torch
from transformers import PreTrainedConfig

from common.errors import UserError
from common.memory.meter import PeakMeter
from common.models.checkpoint.identity import weights_identity
from common.models.checkpoint.watched import WatchedFiles
from common.models.presets import load_config
from common.randomness import seed_run
from common.store import Layout
from common.store.directories import usable_directories
from fuyou.checkpoint.commits import Commits, TrainingState, random_states, restore_random_states
from fuyou.checkpoint.export import StoreReader
from fuyou.checkpoint.fill import fill_store
from fuyou.checkpoint.resume import resume_run
from fuyou.checkpoint.run_files import RunFiles, create_run
from fuyou.checkpoint.shards import Drives
from fuyou.config import EngineConfig
from fuyou.engine.common_decisions import (
    check_io,
    check_memory,
    common_limits,
    prove_once,
    stored_manifest,
    with_common_dtype,
)
from fuyou.engine.runtime import Room, Runtime
from fuyou.engine.write_watch import WriteWatch
from fuyou.layout.record import allocate_extents
from fuyou.layout.record_sums import RecordSums
from fuyou.layout.share import Share
from fuyou.model.chunk_survey import chunk_survey
from fuyou.model.open_model import check_reference
from fuyou.optimizer.absent_gradients import MissedUpdates
from fuyou.optimizer.process.client import OptimizerLink
from fuyou.planner import RunPlan, choose_settings
from fuyou.planner.training_job import job_of_run, open_model
from fuyou.runtime.device import deterministic_algorithms, open_device
from fuyou.runtime.ranks import Agreement, connect, share_of


class OpenRun:
    """Everything that a run has open.

    Args:
        model: checkpoint directory, preset name, or transformers configuration; or the plan of a run of these options
            by a process that is alone, which then opens no model again and plans no memory again.
        config: what is requested; :attr:`config` is what becomes of it.

    Raises:
        UserError: what was requested is not possible; then everything is closed again.
        FinetuneError: something failed; then, too.
    """

    def __init__(self, model: str | os.PathLike[str] | PreTrainedConfig | RunPlan, config: EngineConfig):
        self.closed = False
        self.agreement = Agreement(Share())  # until the other ranks are met
        self.files: RunFiles | None = None
        self.write_watch: WriteWatch | None = None
        self._link: OptimizerLink | None = None
        self._runtime: Runtime | None = None
        self.meter = PeakMeter(self.pids)
        self._determinism = contextlib.ExitStack()
        try:
            self._open_device(model, config)
            self._prove()
            self._open_model()
            self._keep_micro_batch()
            self._choose()
            self._plan_memory()
            self._open_store()
        except BaseException:
            self.close()
            raise

    @property
    def runtime(self) -> Runtime:
        """The memory plan; buffers, workers and the schedule, too, once the store is open."""
        assert self._runtime is not None
        return self._runtime

    @property
    def is_open(self) -> bool:
        """Whether there are buffers and workers."""
        return self._runtime is not None and self._runtime.is_open

    @property
    def is_running(self) -> bool:
        """Whether there are workers, none of which has failed."""
        return self.is_open and self.runtime.plane.executor.failure is None

    def pids(self) -> list[int]:
        """Return the PIDs of all worker processes, the caller's first."""
        link = self._link if self._runtime is None else self._runtime.link
        return [os.getpid()] + ([link.pid] if link is not None else [])

    def reader(self) -> StoreReader:
        """Return what reads the newest committed state."""
        assert self.files is not None
        chunk_elements = self.runtime.memory_plan.chunk_elements
        slot = self.commits.state.slot
        return StoreReader(
            self.files.store, self.layout, self.commits.sums, chunk_elements, slot, self.topology
        )

    def close(self) -> None:
        """Close everything that is open, the last one first; a failure of one does not keep the others."""
        self.closed = True
        with contextlib.ExitStack() as stack:
            stack.callback(self._determinism.close)
            stack.callback(self.meter.stop)
            for part in (self.agreement, self.files, self._link, self._runtime):
                if part is not None:
                    stack.callback(part.close)

    # -- one after the other --------------------------------------------------------------------------------------

    def _open_device(
        self, model: str | os.PathLike[str] | PreTrainedConfig | RunPlan, config: EngineConfig
    ) -> None:
        if torch.get_default_device().type != "cpu":
            raise UserError(
                f"PyTorch makes all tensors on {torch.get_default_device()}, and the engine needs some on the host: "
                "open it outside of `with torch.device(...)`, and after torch.set_default_device(None)."
            )
        store = config.store
        self._ssd = store.drives
        leaving = store.drives_to_leave
        usable_directories([*self._ssd, *leaving])
        if leaving and not store.resume:
            raise UserError("leave_ssd is for a run that is resumed: leave it out.")
        given = self._given = model if isinstance(model, RunPlan) else None
        named = model.job.model.checkpoint if isinstance(model, RunPlan) else model
        read = [each for each in (named, config.weights.adapters) if isinstance(each, str | os.PathLike)]
        self._watched = WatchedFiles(*read)
        if isinstance(model, RunPlan):
            self.model_config = model.job.config
            self.checkpoint = model.job.model.checkpoint
        else:
            self.model_config, self.checkpoint = load_config(model)
        if config.deterministic:  # before CUDA starts
            self._determinism.enter_context(deterministic_algorithms())
        device = config.device if given is None else given.device
        self.device = open_device(device) if isinstance(device, str | torch.device) else device
        share = share_of(config.topology)
        self.topology = config.topology if share.world_size > 1 else None  # one rank alone is alone
        self.agreement = Agreement(share)
        if self.topology is not None:
            connect(self.topology, self.device.torch_device)
        config = with_common_dtype(config, self.device, self.agreement)
        check_io(config, self.device)
        if config.host_cache is not None:
            config = config.with_options(host_cache=config.host_cache // share.ranks_per_node)
        config.check_clipping(share.world_size)
        self.config = config
        self.limits = common_limits(config, self.device, self.agreement) if given is None else given.limits
        # Without a budget of the user's, what the plan falls short of may come from what else is free.
        self.device.cap_memory(None if config.memory.device_memory is None else self.limits[1])
        self._link = OptimizerLink()  # imports PyTorch while the model is built

    def _prove(self) -> None:
        assert self._link is not None
        if self.config.prove:
            prove_once(self.config, self.model_config, self.agreement)
        self._link.wait_until_up()
        self.meter.start()

    def _open_model(self) -> None:
        config = self.config
        share = share_of(self.topology)
        device = self.device.torch_device
        seed_run(config.seed)
        plan = self._given
        if plan is None:
            model = open_model(config, self.model_config, self.checkpoint, device)
            rows, seq_len = self._planned_batch()
            stored = {"piece_bytes": self._stored("piece_bytes")} if config.store.resume else {}
            name = type(model.model).__name__
            all_rows = rows * share.world_size  # ``rows`` are those of this rank
            job = job_of_run(name, config, model, all_rows, seq_len, stored).among(share)
            plan = RunPlan(job, self.device, self.limits, self._ssd)
        self.plan = plan
        self.model = plan.job.model
        if config.memory.reference:
            check_reference(self.model)
        self._source = self.model.weights
        self.layout = plan.fitted.layout
        self.model.layout = self.layout.shared(Share())
        if self.layout.orders and config.prove:
            prove_once(config, self.model_config, self.agreement, pieces=True)
        if share.rank:
            seed_run(config.seed + share.rank)  # what drops out differs, as the sequences do

    def _planned_batch(self) -> tuple[int, int]:
        """Return the shape of a batch that memory is planned for before the first one comes."""
        memory = self.config.memory
        context = getattr(self.model_config.get_text_config(), "max_position_embeddings", None) or 2048
        return memory.batch_shape or (memory.micro_batch or 1, min(context, 2048))

    def _keep_micro_batch(self) -> None:
        """Let a continued run with batches as they were compute as many sequences at once as it did, if memory allows:
        sums are rounded in that order, and how much memory is free is another matter each time."""
        config = self.config
        memory = self.config.memory
        if not config.store.resume or memory.micro_batch is not None or memory.batch_shape is None:
            return
        stored = self._stored("micro_batch")
        if not stored or tuple(stored[:2]) != tuple(memory.batch_shape):
            return
        chunk = memory.chunk or (stored[3] if len(stored) > 3 else None) or None
        continued = replace(self.plan, job=replace(self.plan.fitted, micro_batch=stored[2], chunk=chunk))
        with contextlib.suppress(UserError):
            _ = continued.memory
            self.plan = continued
            self.config = config.with_options(micro_batch=stored[2], chunk=chunk)

    def _stored(self, name: str) -> Any:
        """Return what the manifest of the run to continue says; None if no rank has one. Collective.

        Drives and ranks that are new to the run hold nothing of it.
        """
        values = self.agreement.all_gather_object(stored_manifest(self.config.store.everywhere).get(name))
        return next((value for value in values if value is not None), None)

    def _choose(self) -> None:
        config = self.config
        if not config.automatic or config.memory.batch_shape is None:
            return
        choice = choose_settings(self.plan, self.agreement, self.topology)
        if choice is None and config.store.drive_life:
            warnings.warn(
                "drive_life is not applied: nothing was measured with this model, precision, and batch on these "
                "drives. Measure with finetune profile.",
                stacklevel=2,
            )
        if choice is not None:
            choice["saved_activations"] = config.saved_activations or choice["saved_activations"]
            self.config = config.with_options(**choice)
            self.write_watch = WriteWatch.of_run(self.plan, self.agreement)

    def _plan_memory(self) -> None:
        assert self._link is not None
        runtime = self._runtime = Runtime(
            self.config, self.model, self.layout, self.device, self.limits, self._link, self.topology
        )
        self._link = None  # it is the runtime's now
        loss = self.config.loss_inputs
        runtime.plan(Room(*self._planned_batch(), outputs=loss.outputs, reference=loss.reference))
        self.prove_chunks()
        check_memory(runtime.memory_plan.host_bytes, self.agreement)

    def prove_chunks(self) -> None:
        """See that rows can pass in chunks, if the memory plan has them.

        Raises:
            UserError: they cannot.
        """
        batch = self.runtime.memory_plan.batch
        if batch.chunks == 1:
            return
        if self.config.packed and not chunk_survey(self.model.stack).separates:
            raise UserError(
                f"Rows of {batch.seq_len:,} tokens pass in chunks of {batch.columns:,}, in which nothing keeps the "
                "documents of a row apart in this model: give it shorter rows, which fit whole."
            )
        if self.config.prove:
            prove_once(self.config, self.model_config, self.agreement, chunks=True)

    def _open_store(self) -> None:
        config = self.config
        store = self.config.store
        runtime = self.runtime
        drives = Drives(store.folders, store.folders_to_leave)
        layout = Layout(len(store.drives))
        self._extents = allocate_extents(layout, self.layout.records)
        expected = TrainingState(
            step=0,
            slot=0,
            store="",
            model=self.model.fingerprint,
            dtype=str(config.precision.dtype),
            optimizer_dtype=str(config.precision.moment_dtype),
            optimizer=config.precision.optimizer,
            piece_bytes=self.layout.piece_bytes,
            base=self._base_identity(),
        )
        io: dict[str, Any] = {"io": config.store.io, "throttle": self.device.throttle}
        if store.resume:
            self.files = resume_run(drives, self.model.layout, expected, self.agreement, **io)
            restore_random_states(self.files.state.random, self.device.torch_device)
        else:
            self.files = create_run(drives.folders, layout, expected, self.agreement, store.overwrite, **io)
        state = self.files.state
        if self.model.adapters is not None:
            self.model.adapters.base = state.base
        self.commits = self._make_commits(self.files)
        self.step_count = state.step
        self.user_state: dict[str, Any] = dict(state.user)
        runtime.attach(self.files, self._extents)
        runtime.open(self.commits)
        if store.resume:
            self.created_bytes = 0
            self._check_sources()
        else:
            self.created_bytes = self._fill(self.files)
        runtime.plane.buffers.wait_until_touched()
        if store.resume and not self.agreement.is_alone:
            self.commits.write_manifest()  # a step that this rank alone had committed does not count
        self.agreement.all_gather_object(None)

    def _make_commits(self, files: RunFiles) -> Commits:
        chunk_elements = self.runtime.memory_plan.chunk_elements
        sums = RecordSums(self.layout.records, self._extents, chunk_elements, files.sums)
        missed = MissedUpdates(self.layout.records, files.state.missed)
        return Commits(
            files.store,
            files.state,
            sums,
            missed,
            self.agreement,
            files.run,
            lambda step: self.runtime.ranks.take_checksum(step),
        )

    def _fill(self, files: RunFiles) -> int:
        with self.runtime.io.not_counted():
            fill_store(self.runtime.plane, self._source, 0)
        files.store.sync({extent.file for places in self._extents for extent in places.parameters[:1]})
        self._check_sources()
        self.commits.state.random = random_states(self.device.torch_device)
        self.commits.seal()
        return self.runtime.io.other[1]

    def _base_identity(self) -> str:
        """Return the identity of the checkpoint's weights, which is the same on all ranks. Collective."""
        identities = self.agreement.all_gather_object(weights_identity(self.checkpoint))
        if len(set(identities)) > 1:
            raise UserError(
                f"{self.checkpoint} does not hold the same model for all ranks: copy one to all nodes, or start again "
                "once nothing writes there."
            )
        return identities[0]

    def _check_sources(self) -> None:
        """Refuse a checkpoint, or an adapter, that any rank has seen change since it opened it. Collective."""
        for sentence in self.agreement.all_gather_object(self._watched.changed()):
            if sentence:
                raise UserError(sentence)
