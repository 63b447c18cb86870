"""The single-node engine: fine-tunes a model that is larger than the machine's memory, in an ordinary PyTorch loop."""

import contextlib
import math
import os
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from peft import PeftConfig
from transformers import PreTrainedConfig

from common.errors import FinetuneError, UserError
from common.hardware import memory_available_bytes
from common.memory_meter import PeakMeter, proportional_set_bytes
from common.models.adapters import MERGED, AdapterOptions
from common.models.flops import hardware_flops_per_token, model_flops_per_token
from common.models.presets import load_config
from common.store import DirectoryLock, Layout, Store
from common.store.directories import usable
from common.store.sealed import sync_directory
from common.units import format_bytes, parse_bytes
from fuyou.accounting import Accounting, StepReport
from fuyou.adam import AdamConfig, Update
from fuyou.checksums import RecordSums
from fuyou.clipping import ClipBy, Strikes, clip_by_named, speculation_obstacle
from fuyou.commits import Commits, check_records, load_state, sealed_records
from fuyou.compute import NextToken, NonFiniteLoss, StepComputation
from fuyou.data_plane import DataPlane
from fuyou.deferral import interleaved
from fuyou.devices import memory_limits, open_device
from fuyou.emulated import EmulatedDevice, TimedComputation
from fuyou.exporting import Exporter
from fuyou.frozen import FrozenDtype
from fuyou.io_counter import IoCounter
from fuyou.keeping import Keeping, KeepingPlan
from fuyou.memory_plan import Batch, MemoryPlanner
from fuyou.nodes.agreement import Agreement
from fuyou.nodes.commits import ClusterCommits, find_common_state
from fuyou.nodes.reader import ClusterReader
from fuyou.nodes.topology import Topology, share_of
from fuyou.open_model import OpenModel
from fuyou.optimizer_link import OptimizerLink
from fuyou.planner import Training, choose
from fuyou.recompute import Recomputations
from fuyou.records import Precision, allocate_extents
from fuyou.schedule import Scheduler
from fuyou.share import ALONE, Share
from fuyou.step_shape import BatchShape, StepShape
from fuyou.store_access import StoreReader, fill_store
from fuyou.tasks import Op, StepList
from fuyou.trace import StepTrace
from fuyou.training_state import TrainingState, random_states, restore_random_states


@dataclass
class EngineOutput:
    """What a forward pass gives."""

    loss: torch.Tensor
    """Mean cross entropy over the batch's labels, fp32 scalar; ``backward()`` streams the backward pass."""


@dataclass(frozen=True)
class EngineConfig:
    """Options of :class:`Engine`, validated."""

    precision: Precision
    adam: AdamConfig
    max_grad_norm: float | None
    clip_by: ClipBy | None
    """None leaves it to the planner; without one, it is deferral."""
    deferred_fraction: float
    """Of the blocks whose updates wait for the next forward pass, as asked for."""
    micro_batch: int | None
    commit_every: int
    host_cache: int | None
    single_slot: bool
    io: str
    seed: int
    kept_activations: Keeping | int
    adapters: PeftConfig | None
    trainable: tuple[str, ...] | None
    frozen_dtype: FrozenDtype

    def __post_init__(self) -> None:
        checks = {
            "micro_batch": self.micro_batch is None or self.micro_batch > 0,
            "commit_every": self.commit_every > 0,
            "max_grad_norm": self.max_grad_norm is None or self.max_grad_norm > 0,
            "deferred_fraction": 0 <= self.deferred_fraction <= 1,
            "kept_activations": isinstance(self.kept_activations, Keeping) or self.kept_activations >= 0,
            "lr": self.adam.lr >= 0,
            "weight_decay": self.adam.weight_decay >= 0,
        }
        for name, good in checks.items():
            if not good:
                raise UserError(f"{name} must be positive, not {getattr(self, name, getattr(self.adam, name, None))}.")

    @property
    def speculates(self) -> bool:
        """Whether updates are done before it is known whether the gradient is clipped, and again if it is."""
        return self.max_grad_norm is not None and self.clip_by is ClipBy.SPECULATION

    def deferred(self, shape: StepShape) -> frozenset[int]:
        """Records whose updates wait for the next forward pass: all, if nothing is done before the norm is known."""
        everything = self.max_grad_norm is not None and not self.speculates
        return interleaved(shape, 1.0 if everything else self.deferred_fraction)

    def held(self, shape: StepShape) -> frozenset[int]:
        """Records whose gradients stay until the step has ended."""
        return frozenset(shape.trainable) if self.speculates else self.deferred(shape)


class Engine:
    """Trains a causal language model whose states live on SSD.

    >>> with fuyou.Engine("path/to/checkpoint", ssd=["/mnt/nvme0"], lr=1e-5) as engine:
    ...     for batch in loader:
    ...         loss = engine(**batch).loss
    ...         loss.backward()  # blocks stream in reverse; Adam runs beside it
    ...         engine.step()
    ...     engine.save_pretrained("tuned")

    Every step is committed: whatever happens, ``resume=True`` continues from the last one, bit for bit.

    Args:
        model: checkpoint directory, preset name, or transformers configuration (the last two: random weights).
        ssd: existing directories, one per drive; the store takes 24 bytes per parameter in ``<ssd>/<run_name>``
            (12 with ``single_slot``), striped over them.
        device: ``"cpu"``, a CUDA device (which has not been run yet), or an accelerator that is only timed, to measure
            overlap: ``"emulated:tflops=165,memory=24GiB,link=25GB/s"``, see :mod:`fuyou.emulated`.
        dtype: ``"bf16"`` computes in bf16 with exact fp32 masters; ``"fp32"`` computes in fp32.
        lr, betas, eps, weight_decay: AdamW's. ``engine.lr`` may be set before each step. Biases and norms do not decay.
        max_grad_norm: clip by the global norm, exactly.
        clip_by: how, see :mod:`fuyou.clipping`: ``"deferral"`` of all updates into the next forward pass, when the norm
            is known, which costs 4 more bytes of SSD traffic per parameter where gradients find no room in host memory;
            or ``"speculation"``, updates in the backward pass, done again in steps that are clipped, which costs 2, and
            needs two slots, ``commit_every=1`` and a single rank. ``"auto"`` takes the planner's choice, if
            ``automatic`` lets it choose; else deferral. The same numbers.
        deferred_fraction: part of the blocks, spread over the stack, that are updated during the next forward pass: the
            same numbers, and a shorter step where computing and the SSDs take about as long. Costs host memory for
            their gradients.
        kept_activations: outputs of operators inside the blocks that are kept for the backward pass instead of computed
            again, on the device, the host or the SSDs, wherever there is room: so many bytes (or ``"64MiB"``) of each
            block and micro-batch, those that save the most computing per byte; or a :class:`fuyou.Keeping`. The same
            numbers, and a shorter step where computing is the bound.
        micro_batch: sequences that are computed at once; None takes the largest number that fits.
        host_memory, device_memory: budgets, in bytes or as ``"64GiB"``; None takes what the machine has. On a CPU the
            device's memory is a part of the host's.
        host_cache: most of ``host_memory`` to spend on keeping parameters, then optimizer states too, from step to
            step; None spends what nothing else needs, 0 streams everything.
        optimizer_dtype: ``"fp32"``, or ``"bf16"`` moments with stochastic rounding.
        seed: of random weights, dropout and stochastic rounding.
        run_name: name of the run's folder in each of ``ssd``.
        commit_every: commit every N-th step only: what lives in host memory is not written in between. A crash loses up
            to N steps.
        single_slot: half the space, no protection: a crash in the middle of a step loses the run.
        resume: continue the run that the directories hold.
        overwrite: replace the run that the directories hold.
        io: ``"posix"``, which ``"auto"`` takes: all traffic goes through host memory, which kvikio reaches by the same
            calls; or ``"kvikio"``, which is checked and not used further.
        batch_shape: (sequences, tokens per sequence) of the batches to come; without it, buffers are planned for one
            micro-batch and made again if the first batch is larger.
        adapters: train these and freeze the weights: a configuration of ``peft``, or the few settings of
            :class:`common.models.adapters.AdapterOptions`. Frozen weights take 2 bytes per parameter on SSD (4 in fp32)
            and are only read; adapters and their states are fp32, live in host memory, and are what is committed.
        trainable: train only parameters with these names (``*`` stands for anything) and freeze the others likewise.
        frozen_dtype: ``"int8"`` or ``"nf4"`` keeps frozen matrices of the blocks in 1.016 or 0.5625 bytes per parameter
            on SSD, on their way and in the host's cache; they are brought back into ``dtype`` on the device. Not
            lossless: every weight is rounded once, when the store is made. None keeps them in ``dtype``.
        automatic: let the planner choose ``deferred_fraction``, ``kept_activations`` and ``clip_by`` where they are not
            given, by simulation of this run on this machine. Needs ``batch_shape`` and a profile of this machine with
            this model (``finetune --profile``); without one nothing is chosen. Costs 0.1 to 3 s at the start, and
            changes no number. On one rank only.
        topology: the other ranks, if there are any (an ``fcdp.Topology``). Every rank makes an engine, with directories
            of its own and otherwise alike, gives it its own part of every batch, and calls everything that the others
            call. Every node keeps one copy of the parameters, of which each of its M ranks stores 1/M; optimizer states
            are spread over all W ranks. ``host_memory`` and ``host_cache`` are those of the node. An error on one rank
            leaves the others waiting for it: end their processes, as torchrun does.

    Raises:
        UserError: what was asked for is not possible (paths, space, budgets, model).
        FinetuneError: something failed.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | PreTrainedConfig,
        *,
        ssd: Sequence[str | os.PathLike[str]],
        device: str | torch.device = "cpu",
        dtype: str = "bf16",
        optimizer_dtype: str = "fp32",
        lr: float = 1e-5,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        max_grad_norm: float | None = None,
        clip_by: str = "auto",
        deferred_fraction: float = 0.0,
        micro_batch: int | None = None,
        host_memory: int | str | None = None,
        device_memory: int | str | None = None,
        host_cache: int | str | None = None,
        seed: int = 0,
        run_name: str = "fuyou",
        commit_every: int = 1,
        single_slot: bool = False,
        resume: bool = False,
        overwrite: bool = False,
        io: str = "auto",
        batch_shape: tuple[int, int] | None = None,
        kept_activations: Keeping | int | str | None = None,
        adapters: PeftConfig | AdapterOptions | None = None,
        trainable: Sequence[str] | None = None,
        frozen_dtype: str | None = None,
        automatic: bool = False,
        topology: Topology | None = None,
    ):
        self._options = EngineConfig(
            Precision.named(dtype, optimizer_dtype), AdamConfig(lr, betas, eps, weight_decay),
            max_grad_norm, clip_by_named(clip_by), deferred_fraction, micro_batch, commit_every,
            None if host_cache is None else parse_bytes(host_cache), single_slot, io, seed,
            kept_activations if isinstance(kept_activations, Keeping) else parse_bytes(kept_activations or 0),
            adapters.peft_config() if isinstance(adapters, AdapterOptions) else adapters,
            None if trainable is None else tuple(trainable), _frozen_dtype(frozen_dtype),
        )  # fmt: skip
        self.lr = lr
        self._closed = False
        self._plane: DataPlane | None = None
        self._store: Store | None = None
        self._lock: DirectoryLock | None = None
        self._link: OptimizerLink | None = None
        self._step: StepComputation | TimedComputation | None = None
        self._in_flight = False
        self._trace: StepTrace | None = None
        self._agreement: Agreement | None = None
        self._items: int | None = None  # labels in the batches of all ranks, where there are several
        self._io = IoCounter(self._io_now)
        self._meter = PeakMeter(self._pids)
        try:
            self._ssd = [Path(path) for path in ssd]
            usable(self._ssd)
            self.config, self._checkpoint = load_config(model)
            self._device = open_device(device)
            self.emulated = isinstance(self._device, EmulatedDevice)
            self._pace = self._device.spec.pace if isinstance(self._device, EmulatedDevice) else None
            share = share_of(topology)
            topology = self._topology = topology if share.world_size > 1 else None  # one rank alone is alone
            self._agreement = Agreement(share) if topology is not None else None
            self._cluster_options(share)
            self._check_clipping(share)
            limits = memory_limits(self._device, host_memory, device_memory, share.ranks_per_node)
            self._host_limit, self._device_limit = self._smallest(limits)
            self._device.cap_memory(self._device_limit)
            self._link = OptimizerLink()  # imports PyTorch while the model is built
            self._link.wait_until_up()
            self._meter.start()
            self._open_model()
            if automatic and batch_shape is not None and topology is None:
                strikes = Strikes.of_run(path / run_name for path in self._ssd) if resume else Strikes()
                self._choose(batch_shape, strikes)
            self._plan_buffers()
            self._open_store(run_name, resume, overwrite, batch_shape)
        except BaseException:
            self.close()
            raise

    # -- opening --------------------------------------------------------------------------------------------------

    def _cluster_options(self, share: Share) -> None:
        """What several ranks make of the options.

        Raises:
            UserError: these do not go together.
        """
        if share.world_size == 1:
            return
        options = self._options
        if isinstance(self._device, EmulatedDevice):
            spec = self._device.spec
            for level, ranks, rate in (
                ("inside", share.ranks_per_node, spec.inside_bytes_per_second),
                ("across", share.nodes, spec.across_bytes_per_second),
            ):
                if ranks > 1 and rate is None:
                    raise UserError(f"An emulated accelerator among several ranks needs a rate: add {level}=10GB/s.")
        if options.host_cache is not None:
            self._options = replace(options, host_cache=options.host_cache // share.ranks_per_node)

    def _check_clipping(self, share: Share) -> None:
        """
        Raises:
            UserError: speculation was asked for, and is not possible.
        """
        options = self._options
        obstacle = speculation_obstacle(
            single_slot=options.single_slot, commit_every=options.commit_every, ranks=share.world_size
        )
        if options.speculates and obstacle is not None:
            raise UserError(f"--clip-by speculation is not possible: {obstacle}. Leave it out, or change that.")

    def _smallest(self, limits: tuple[int, int]) -> tuple[int, int]:
        """The smallest budgets of all ranks: they must plan alike, for their collectives to match."""
        if self._agreement is None:
            return limits
        hosts, devices = zip(*self._agreement.tell(limits), strict=True)
        return min(hosts), min(devices)

    def _open_model(self) -> None:
        options = self._options
        torch.manual_seed(options.seed)
        self._model = OpenModel(
            self.config, options.precision, self._device.torch_device, options.adapters, options.trainable,
            options.frozen_dtype, options.seed,
        )  # fmt: skip
        share = share_of(self._topology)
        if options.frozen_dtype is not FrozenDtype.PLAIN and share != ALONE:
            raise UserError("--frozen-dtype does not go with several ranks yet: leave it out.")
        self._source = self._model.weights(self._checkpoint)
        self._stack, self._shape = self._model.stack, self._model.shape.shared(share)
        if share.rank:
            torch.manual_seed(options.seed + share.rank)  # what drops out differs, as the sequences do
        self.parameters, self.trainable_parameters = self._model.parameters, self._model.trainable_parameters

    def _choose(self, batch_shape: tuple[int, int], strikes: Strikes) -> None:
        """Take from the planner what was left open, if this machine and model have been profiled."""
        options = self._options
        model, (rows, seq_len) = self._stack.model, batch_shape
        training = Training(
            type(model).__name__, self.config, self._stack, self._shape, rows, seq_len,
            model_flops_per_token(model, seq_len), hardware_flops_per_token(model, seq_len),
            clips=options.max_grad_norm is not None, single_slot=options.single_slot, micro_batch=options.micro_batch,
            deferred_fraction=options.deferred_fraction or None, host_cache=options.host_cache,
            keeping=options.kept_activations if isinstance(options.kept_activations, Keeping) else None,
            commit_every=options.commit_every, clip_by=options.clip_by, clipped_share=strikes.share,
        )  # fmt: skip
        choice = choose(training, self._device, (self._host_limit, self._device_limit), self._ssd)
        if choice is not None:
            fraction = options.deferred_fraction or choice.deferred_fraction
            self._options = replace(
                options, micro_batch=choice.micro_batch, deferred_fraction=fraction,
                kept_activations=options.kept_activations or choice.keeping, clip_by=choice.clip_by,
            )  # fmt: skip

    def _plan_buffers(self) -> None:
        self._keeping = KeepingPlan(
            self._stack, "cpu" if self._device.shares_host_memory else "cuda", self._options.precision.dtype,
            self._options.kept_activations,
        )  # fmt: skip
        self._planner = MemoryPlanner(
            self._shape,
            self.config,
            self._device_limit,
            self._host_limit,
            self._device.shares_host_memory,
            deferred=len(self._options.deferred(self._shape)),
            speculative=self._options.speculates,
            host_cache=self._options.host_cache,
            kept_layers=len(self._keeping.layers),
            kept_bytes=lambda batch: self._keeping.keep(batch.micro_rows, batch.seq_len).nbytes,
        )

    def _open_store(self, run_name: str, resume: bool, overwrite: bool, batch_shape: tuple[int, int] | None) -> None:
        options, slots = self._options, 1 if self._options.single_slot else 2
        context = getattr(self.config.get_text_config(), "max_position_embeddings", None) or 2048
        rows, seq_len = batch_shape or (options.micro_batch or 1, min(context, 2048))
        self.memory_plan = self._planner.plan(rows, seq_len, options.micro_batch)
        available = memory_available_bytes()
        if self.memory_plan.host_bytes > available:
            raise UserError(
                f"This run would take {format_bytes(self.memory_plan.host_bytes)} of host memory, and "
                f"{format_bytes(available)} are available (other programs and control groups counted): the system "
                "would end it on the way. Lower --host-memory, or end what takes the memory."
            )
        layout = Layout(len(self._ssd))
        self._extents = allocate_extents(layout, self._shape.records, slots)
        folders = [path / run_name for path in self._ssd]
        wanted = TrainingState(
            0, 0, "", self._model.fingerprint, str(options.precision.dtype),
            str(options.precision.optimizer_dtype), slots, emulated=self.emulated,
        )  # fmt: skip
        self.created_bytes = 0
        # Everything goes through host memory, so there is nothing for "auto" to measure.
        io: dict[str, Any] = {"io": "posix" if options.io == "auto" else options.io, "pace": self._pace}
        run = self._agreement.tell(uuid.uuid4().hex)[0] if self._agreement is not None else ""
        if resume:
            self._lock = DirectoryLock(folder for folder in folders if folder.is_dir())
            if self._agreement is None:
                self._store = Store.open(folders, **io)
                state = load_state(self._store, wanted)
                check_records(self._store, state)
            else:
                self._store, state, run = find_common_state(self._agreement, lambda: Store.open(folders, **io), wanted)
            self._io.begin()
            restore_random_states(state.random, self._device.torch_device)
        else:
            made = [folder for folder in folders if not folder.exists()]
            for folder in made:
                folder.mkdir()
            try:
                self._lock = DirectoryLock(folders)
                for folder in made:
                    sync_directory(folder.parent)  # or a power cut takes the folder, with every commit in it
                self._store = Store.create(folders, layout, overwrite=overwrite, **io)
            except BaseException:
                for folder in made:
                    with contextlib.suppress(OSError):  # not empty, say: what went wrong first is what counts
                        folder.rmdir()
                raise
            state = replace(wanted, store=self._store.id)
        sums = RecordSums(self._shape.records, self._extents, sealed_records(self._store, state) if resume else ())
        self._commits = self._make_commits(state, run, sums)
        self.step_count = state.step
        self.user_state: dict[str, Any] = dict(state.user)
        self._open_plane()
        if not resume:
            assert self._plane is not None
            with self._io.not_counted():
                fill_store(self._plane, self._source, 0)
            self._store.sync({extent.file for places in self._extents for extent in places.parameters[:1]})
            state.random = random_states(self._device.torch_device)
            self._commits.seal()
            self.created_bytes = self._io.other[1]
        elif self._agreement is not None:
            self._commits.write_manifest()  # a step that this rank alone had committed does not count
        if self._agreement is not None:
            self._agreement.tell(None)
        if self._model.adapters is not None:
            self._model.adapters.forget_initial_values()

    def _make_commits(self, state: TrainingState, run: str, sums: RecordSums) -> Commits:
        assert self._store is not None
        if self._agreement is None:
            return Commits(self._store, state, self._options.single_slot, sums)
        single_slot = self._options.single_slot
        return ClusterCommits(self._agreement, run, self._checksum, self._store, state, single_slot, sums)

    def _checksum(self, step: int) -> int:
        """Of the parameters that this rank stores, as ``step`` has left them."""
        assert self._plane is not None and self._plane.ranks is not None
        return self._plane.ranks.take_checksum(step)

    def _open_plane(self) -> None:
        """Allocate everything and start the workers, by the memory plan."""
        assert self._store is not None and self._lock is not None
        options = self._options
        if self._link is None:
            self._link = OptimizerLink()
            self._link.wait_until_up()
        batch = self.memory_plan.batch
        recomputation = self._keeping.recomputation(batch.micro_rows, batch.seq_len)
        self._recomputations = Recomputations(
            recomputation.layers,
            self._keeping.keep(batch.micro_rows, batch.seq_len).operators,
            self.memory_plan.kept_bytes,
        )
        self._scheduler = Scheduler(
            self._shape, self.memory_plan.counts, single_slot=options.single_slot, slot=self._commits.state.slot,
            deferred=options.deferred(self._shape), hold=options.max_grad_norm is not None,
            speculate=options.speculates, resident=self.memory_plan.resident, recomputation=recomputation,
        )  # fmt: skip
        self._plane = DataPlane(
            self._shape, self.memory_plan, self._device, self._store, self._extents, self._commits.state.slots,
            self._link, [folder / "scratch" for folder in self._store.directories], self._commits.commit,
            self._commits.update_of, spill_gradients=self.memory_plan.spills_gradients(
                self._shape, options.held(self._shape)
            ),
            resident=self.memory_plan.resident, pace=self._pace, topology=self._topology,
            locks=self._lock.descriptors, sums=self._commits.sums,
        )  # fmt: skip
        self._accounting = Accounting(self._plane, self._trace)

    def _close_plane(self) -> None:
        """Give all buffers back. What is pending must have been flushed; what is not is lost."""
        if self._plane is not None:
            self._plane.close()
            self._io.ended(self._plane.io_bytes())
            self._plane = None
        if self._link is not None:
            self._link.close()
            self._link = None

    # -- training -------------------------------------------------------------------------------------------------

    def __call__(self, **batch: torch.Tensor) -> EngineOutput:
        """The streamed forward pass.

        Args:
            batch: ``input_ids`` and ``labels`` int64 ``[B, S]`` (not shifted, -100 where no loss is wanted);
                optionally ``position_ids`` ``[B, S]`` (restarting at each document of a packed row) and
                ``attention_mask``.

        Raises:
            NonFiniteLoss: the loss is NaN or infinite; the last committed step is intact.
            UserError: the batch does not fit the budgets.
        """
        if not torch.is_grad_enabled():
            return EngineOutput(torch.tensor(self.eval_loss(**batch)))
        if self._step is not None:
            raise FinetuneError(
                "engine() was called again before the last step was ended with loss.backward() and engine.step(). For "
                "a forward pass alone, use engine.eval_loss(); for larger batches, pass the whole batch at once."
            )
        plane = self._prepare(batch)
        began = time.monotonic()
        step = self.step_count + 1
        self._commits.begin(Update(step, replace(self._options.adam, lr=self.lr), 1.0, self._options.seed))
        shape = self._batch_shape(batch)
        self._in_flight = True  # before the schedule changes: an interrupt may come at any point
        tasks = self._scheduler.training_step(step, shape, commit=step % self._options.commit_every == 0)
        self._step = self._computation(plane, tasks, batch, began)
        self._submit(tasks)
        self._step.forward()
        loss = self._step.loss = self._whole_loss(self._step.loss)
        if not math.isfinite(loss):
            self._finish_earlier_commit()
            raise NonFiniteLoss(f"The loss of step {step} is {loss}.", step, self.committed_step)
        anchor = torch.ones((), requires_grad=True)
        # On the CPU, so that the streamed backward runs in the caller's thread whatever the device.
        return EngineOutput(_StreamedLoss.apply(anchor, torch.tensor(loss), self))

    def _backward(self) -> None:
        assert self._step is not None
        self._step.backward()

    def step(self) -> StepReport:
        """End the step: its updates (if deferred) and its commit may go on while the next step runs.

        Raises:
            NonFiniteLoss: the gradient is not finite; the step is not committed.
        """
        current = self._step
        if current is None or not current.complete:
            raise FinetuneError("engine.step() comes after engine(**batch).loss.backward().")
        plane, step = self._plane, self.step_count + 1
        assert plane is not None and current.tasks.end is not None
        norm = self._gradient_norm(current)
        if not math.isfinite(norm):
            self._finish_earlier_commit()
            raise NonFiniteLoss(f"The gradient norm of step {step} is {norm}.", step, self.committed_step)
        limit = self._options.max_grad_norm or math.inf
        clipped = norm > limit
        if clipped:
            # As torch.nn.utils.clip_grad_norm_ does it.
            self._commits.scale_gradients(step, limit / (norm + 1e-6))
        self.step_count = step
        self._commits.end(step, self._device.torch_device, self.user_state)
        plane.executor.finish(current.tasks.end)
        if self._options.speculates:
            self._submit(self._scheduler.settle(step, clipped))
        self._step = None
        self._in_flight = False
        seconds = time.monotonic() - current.began
        times = self._accounting.take()
        return StepReport(
            step=step,
            loss=current.loss,
            grad_norm=norm,
            seconds=seconds,
            tokens=current.tokens,
            bound_seconds=times.busy,
            idle_seconds=times.idle,
            planned_read_bytes=current.tasks.ssd_read_bytes(),
            planned_written_bytes=current.tasks.ssd_written_bytes(),
            planned_sent_bytes=current.tasks.sent_bytes(),
            kept_activation_bytes=current.tasks.kept_bytes(self.memory_plan.kept_bytes),
            recomputation_saved=current.recomputation_saved,
            clipped=clipped,
        )

    @torch.no_grad()
    def eval_loss(self, **batch: torch.Tensor) -> float:
        """Mean loss over a batch, forward only; nothing changes but pending updates, which are applied first."""
        self.flush()
        plane = self._prepare(batch)
        tasks = self._scheduler.evaluation(self.step_count, self._batch_shape(batch))
        computation = self._computation(plane, tasks, batch, time.monotonic())
        self._stack.model.eval()
        try:
            self._submit(tasks)
            return self._whole_loss(float(computation.forward()))
        finally:
            self._accounting.take()
            self._stack.model.train()

    def _whole_loss(self, loss: float) -> float:
        """The sum of what all ranks have found, added in fp32 in their order."""
        if self._agreement is None:
            return loss
        total, *others = (torch.tensor(told, dtype=torch.float32) for told in self._agreement.tell(loss))
        for other in others:
            total += other
        return float(total)

    def _gradient_norm(self, current: StepComputation | TimedComputation) -> float:
        """Of the gradient summed over all ranks."""
        if self._agreement is None or self.emulated:
            return current.gradient_norm()
        assert self._plane is not None and self._plane.ranks is not None
        reductions = [task for task in current.tasks.tasks if task.op in (Op.GRADIENT_REDUCE, Op.GRADIENT_EXCHANGE)]
        self._plane.executor.wait(reductions)
        self._device.synchronize()
        squares = self._plane.ranks.take_squares(current.tasks.step)
        return math.sqrt(sum(self._agreement.tell(float(squares))))

    @torch.no_grad()
    def next_logits(self, input_ids: torch.Tensor) -> torch.Tensor:
        """The model's prediction after a sequence: fp32 ``[V]`` for int64 ``[1, S]``.

        Nothing is kept from call to call, so each reads the whole model and computes the whole sequence: for looking at
        what a model has learnt, not for serving it.

        Raises:
            UserError: this is not one sequence, or the run is emulated.
        """
        if self.emulated:
            raise UserError("A run on an emulated device computes nothing, so there is nothing that it could say.")
        if input_ids.dim() != 2 or input_ids.shape[0] != 1 or not input_ids.numel():
            raise UserError(f"next_logits takes one sequence, [1, tokens], not {list(input_ids.shape)}.")
        self.flush()
        batch = {"input_ids": input_ids, "labels": input_ids}
        plane = self._fitting_plane(batch)
        tasks = self._scheduler.evaluation(self.step_count, self._batch_shape(batch))
        computation = NextToken(
            self._stack, plane, tasks, batch, self.memory_plan, self._recomputations, time.monotonic()
        )
        self._stack.model.eval()
        try:
            self._submit(tasks)
            computation.forward()
            return computation.logits
        finally:
            self._accounting.take()
            self._stack.model.train()

    def flush(self) -> None:
        """Apply what is pending and commit the last step; returns when it is on SSD."""
        if self._plane is None:
            return
        if self._step is not None:
            raise FinetuneError("A step is under way: call loss.backward() and engine.step() first.")
        uncommitted = self.step_count != self._commit_requested()
        if self._scheduler.pending or uncommitted:
            self._submit(self._scheduler.flush(self.step_count, commit=True))
        self._plane.executor.drain()

    def _submit(self, tasks: StepList) -> None:
        """Let the lanes run ``tasks``, and note what they will cost."""
        assert self._plane is not None
        self._io.submitted(tasks)
        self._plane.executor.submit(tasks.tasks)
        self._commits.submitted(tasks.tasks)
        self._accounting.watch(tasks)

    def _computation(
        self, plane: DataPlane, tasks: StepList, batch: dict[str, torch.Tensor], began: float
    ) -> StepComputation | TimedComputation:
        if isinstance(self._device, EmulatedDevice):
            return TimedComputation(self._device, plane.executor, tasks, batch["input_ids"].numel(), began)
        return StepComputation(
            self._stack, plane, tasks, batch, self.memory_plan, self._recomputations, began, self._items
        )

    def _commit_requested(self) -> int:
        """The newest step whose commit is done or among the submitted tasks."""
        return self._scheduler.commit_step if self._scheduler.commit_step is not None else self.committed_step

    def _prepare(self, batch: dict[str, torch.Tensor]) -> DataPlane:
        """Check the batch, and find room for it."""
        if self._closed:
            raise FinetuneError("The engine has been closed.")
        for name in ("input_ids", "labels"):
            if batch.get(name) is None or batch[name].dim() != 2:
                raise UserError(f"A batch needs {name} of shape [sequences, tokens].")
        items = self._count_labels(batch)
        if not items:
            raise UserError("No token of this batch has a label (all are -100): there is nothing to learn from it.")
        self._items = items if self._agreement is not None else None
        return self._fitting_plane(batch)

    def _count_labels(self, batch: dict[str, torch.Tensor]) -> int:
        """In the batches of all ranks."""
        items = int((batch["labels"][:, 1:] != -100).sum())
        return items if self._agreement is None else sum(self._agreement.tell(items))

    def _fitting_plane(self, batch: dict[str, torch.Tensor]) -> DataPlane:
        """Buffers in which the batch has room, on every rank."""
        rows, seq_len = batch["input_ids"].shape
        if self._agreement is not None:  # all or none of the ranks make their buffers anew
            rows, seq_len = (max(sizes) for sizes in zip(*self._agreement.tell((rows, seq_len)), strict=True))
        planned = self.memory_plan.batch
        if self._plane is None or rows > planned.rows or seq_len > planned.seq_len:
            self.flush()
            self.memory_plan = self._planner.plan(
                max(rows, planned.rows), max(seq_len, planned.seq_len), self._options.micro_batch
            )
            self._close_plane()
            self._open_plane()
        assert self._plane is not None
        return self._plane

    def _batch_shape(self, batch: dict[str, torch.Tensor]) -> BatchShape:
        rows, seq_len = batch["input_ids"].shape
        split = Batch(rows, seq_len, min(rows, self.memory_plan.batch.micro_rows))
        plan = self.memory_plan
        return BatchShape(split.micro_batches, plan.activation_bytes, split.mean_tokens, plan.kept_bytes)

    # -- committing -----------------------------------------------------------------------------------------------

    def _finish_earlier_commit(self) -> None:
        """Let the previous step's commit, which runs beside this one, come to its end."""
        if self._plane is not None:
            self._plane.executor.wait(self._commits.under_way(self.step_count + 1))

    @property
    def committed_step(self) -> int:
        """The step that ``resume`` would continue from."""
        return self._commits.committed_step

    # -- reading --------------------------------------------------------------------------------------------------

    def _reader(self) -> StoreReader:
        assert self._store is not None
        slot = self._commits.state.slot
        places = (self._store, self._shape, self._extents, self.memory_plan.chunk_elements, slot)
        return StoreReader(*places) if self._topology is None else ClusterReader(self._topology, *places)

    def named_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every parameter's name and fp32 master weight (or frozen value), read from the store one at a time."""
        self.flush()
        with self._io.not_counted():
            yield from self._reader().masters()

    def save_pretrained(self, directory: str | os.PathLike[str], *, merge: bool = False) -> None:
        """Export what was trained: a Hugging Face checkpoint in the compute dtype, or a PEFT adapter directory.

        Record by record, and buffers are given back meanwhile, so that it stays within the host budget. Training can
        go on afterwards.

        Args:
            directory: made if it is not there; files of the same names are replaced.
            merge: write a checkpoint with the adapters merged into the weights as well, in the folder ``merged`` of
                ``directory``.

        Raises:
            UserError: the run is emulated: its weights mean nothing.
        """
        if self.emulated:
            raise UserError("A run on an emulated device has no weights worth keeping: nothing is exported.")
        self.flush()
        self._close_plane()
        share = self._shape.share
        if share.node == 0:  # whose ranks have everything together
            self._write(Path(directory), merge, writes=share.rank == 0)
        if self._agreement is not None:
            self._agreement.tell(None)

    def _write(self, target: Path, merge: bool, writes: bool) -> None:
        """``writes``: whether this rank writes what the ranks of this node read together."""
        dtype = self._options.precision.dtype
        exporter = Exporter(self._model, self._reader(), self._shape, self._checkpoint, self._host_limit, writes)
        with self._io.not_counted():
            if self._model.adapters is None:
                exporter.checkpoint(target, dtype)
                return
            exporter.adapter(target)
            if merge:
                exporter.checkpoint(target / MERGED, dtype)

    # -- figures --------------------------------------------------------------------------------------------------

    def model_flops_per_token(self, seq_len: int) -> float:
        """6 per parameter and token, plus attention; recomputation not counted."""
        return model_flops_per_token(self._stack.model, seq_len)

    def hardware_flops_per_token(self, seq_len: int) -> float:
        """The same with the recomputed forward pass counted."""
        return hardware_flops_per_token(self._stack.model, seq_len)

    def io_bytes(self) -> tuple[int, int]:
        """Bytes that training has read from and written to the SSDs, in all our processes."""
        return self._io.training

    def planned_io_bytes(self) -> tuple[int, int]:
        """What the schedule says that :meth:`io_bytes` comes to, once everything submitted is done."""
        return self._io.planned

    def _io_now(self) -> tuple[int, int]:
        """What the store and the optimizer process there are have moved."""
        parts = [(store.bytes_read, store.bytes_written) for store in (self._store,) if store is not None]
        parts += [plane.io_bytes() for plane in (self._plane,) if plane is not None]
        return sum(read for read, _ in parts), sum(written for _, written in parts)

    def host_memory_in_use(self) -> int:
        """Proportional set size of our processes, in bytes, beyond what they had before the model was touched."""
        return max(0, proportional_set_bytes(self._pids()) - self.host_baseline_bytes)

    @property
    def host_peak_bytes(self) -> int:
        """Most host memory that our processes ever held together, bytes of proportional set size."""
        return self._meter.peak_bytes

    @property
    def host_baseline_bytes(self) -> int:
        """The same just before the model was touched."""
        return self._meter.baseline_bytes

    @property
    def device_peak_bytes(self) -> int:
        """Most device memory in use. Where the CPU is the device: what the plan gives it."""
        measured = self._device.peak_bytes()
        return self.memory_plan.device_bytes if measured is None else measured

    def _pids(self) -> list[int]:
        return [os.getpid()] + ([self._link.pid] if self._link is not None else [])

    # -- seeing ---------------------------------------------------------------------------------------------------

    def keep_trace(self) -> None:
        """From the next step on, keep what happens in the newest step, for :meth:`write_trace`."""
        self._trace = StepTrace(self._shape.records)
        self._accounting = Accounting(self._plane, self._trace) if self._plane is not None else self._accounting

    def write_trace(self, path: str | os.PathLike[str]) -> None:
        """Write the newest step's tasks as a Chrome trace; they are brought to their end first.

        Raises:
            UserError: no step was taken since :meth:`keep_trace`, or the file cannot be written.
        """
        self.flush()
        self._accounting.take()
        (self._trace or StepTrace([])).write(Path(path))

    # -- closing --------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Stop. A step in flight is discarded, a finished one is committed; ``resume`` continues from there."""
        if self._closed:
            return
        try:
            if self._plane is not None and self._plane.executor.failure is None:
                if not self._in_flight:
                    self.flush()
                elif self._step is not None:
                    self._step.abandon()
                    self._finish_earlier_commit()
        finally:
            self._closed = True
            self._step = None
            with contextlib.ExitStack() as stack:  # the last one first; a failure of one does not keep the others
                stack.callback(self._meter.stop)
                for part in (self._agreement, self._lock, self._store):
                    if part is not None:
                        stack.callback(part.close)
                stack.callback(self._close_plane)

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close()


def _frozen_dtype(name: str | None) -> FrozenDtype:
    names = [one.value for one in FrozenDtype if one is not FrozenDtype.PLAIN]
    if name is not None and name not in names:
        raise UserError(f"frozen_dtype must be {' or '.join(names)}, or None for what blocks compute in, not {name!r}.")
    return FrozenDtype.PLAIN if name is None else FrozenDtype(name)


class _StreamedLoss(torch.autograd.Function):
    """Ties the loss to the engine: its backward is the streamed backward pass."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, loss: torch.Tensor, engine: Engine) -> torch.Tensor:
        ctx.engine = engine
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        if float(gradients[0]) != 1.0:
            raise FinetuneError(
                f"The loss was scaled by {float(gradients[0])} before backward(). The head's gradient is computed with "
                "the loss, so scale the learning rate instead."
            )
        ctx.engine._backward()
        return None, None, None
