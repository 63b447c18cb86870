"""The single-node engine: fine-tunes a model that is larger than the machine's memory, in an ordinary PyTorch loop."""

import contextlib
import math
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from peft import PeftConfig
from transformers import PreTrainedConfig

from common.data import restarts
from common.data.rows import holds_images
from common.errors import FinetuneError, UserError
from common.hardware.machine import memory_available_bytes
from common.memory.meter import PeakMeter, proportional_set_bytes
from common.models.adapters.adapters import MERGED
from common.models.adapters.options import AdapterOptions
from common.models.checkpoint.saving import NonFiniteWeights
from common.models.flops import hardware_flops_per_token, model_flops_per_token
from common.models.presets import load_config
from common.models.task_type import TaskType
from common.models.vision.towers import TowerFreezing
from common.store import Layout
from common.store.directories import usable_directories
from common.units import format_bytes, parse_bytes
from fuyou.checkpoint.cluster_commits import ClusterCommits
from fuyou.checkpoint.cluster_reader import ClusterReader
from fuyou.checkpoint.commits import Commits, sealed_records
from fuyou.checkpoint.export import Exporter
from fuyou.checkpoint.reshard import regroup
from fuyou.checkpoint.restripe import Drives
from fuyou.checkpoint.run_files import RunFiles, create_run, resume_run
from fuyou.checkpoint.state import TrainingState, random_states, restore_random_states
from fuyou.checkpoint.store_access import StoreReader, fill_store
from fuyou.config import EngineConfig
from fuyou.engine.computing_dtype import AUTO, DEFAULT, dtype_of_all, stored_dtype
from fuyou.engine.runtime import Runtime
from fuyou.layout.checksums import RecordSums
from fuyou.layout.frozen_weights import FrozenDtype
from fuyou.layout.record import DTYPES, Precision, allocate_extents
from fuyou.layout.share import Share
from fuyou.model.loss import targets_of
from fuyou.model.open_model import OpenModel
from fuyou.model.streamed_loss import streamed_loss
from fuyou.optimizer.absent_gradients import MissedUpdates
from fuyou.optimizer.adam import AdamConfig, Update, check_learning_rate, check_max_grad_norm
from fuyou.optimizer.client import OptimizerLink
from fuyou.optimizer.clipping import ClipBy, ClipStatistics, clip_by_named
from fuyou.optimizer.nonfinite import NonFinitePolicy
from fuyou.planner import Choice, PlannerContext, choose
from fuyou.planner.choose_together import choose_together
from fuyou.planner.training import training_of_run
from fuyou.preflight import prove as prove_family
from fuyou.ranks.agreement import Agreement
from fuyou.ranks.topology import ClusterTopology, share_of
from fuyou.recompute.policy import ActivationPolicy
from fuyou.runtime.accounting import StepReport
from fuyou.runtime.compute import NextToken, StepComputation
from fuyou.runtime.data_plane import DataPlane
from fuyou.runtime.devices import memory_limits, open_device
from fuyou.runtime.emulated import EmulatedDevice, TimedComputation
from fuyou.schedule.memory_plan import MemoryPlan
from fuyou.schedule.tasks import Op, StepList


@dataclass
class EngineOutput:
    """What a forward pass gives."""

    loss: torch.Tensor
    """Mean cross entropy over the batch's labels and, if the model has one, its router loss times its coefficient: fp32
    scalar; ``backward()`` streams the backward pass."""
    aux_loss: float | None = None
    """That router loss, not multiplied, as transformers names it; None if there is none."""


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
            overlap: ``"emulated:tflops=165,memory=24GiB,link=25GB/s"``, see :mod:`fuyou.runtime.emulated`.
        dtype: ``"bf16"`` computes in bf16 with exact fp32 masters; ``"fp32"`` computes in fp32; ``"auto"`` takes what
            a run that is continued began with, else what the device (of several ranks, the first one's) multiplies
            faster.
        lr, betas, eps, weight_decay: AdamW's. ``engine.lr`` may be set before each step. Biases and norms do not decay.
        max_grad_norm: clip by the global norm, exactly.
        clip_by: how, see :mod:`fuyou.optimizer.clipping`: ``"deferral"`` of all updates into the next forward pass,
            when the norm is known, which costs 4 more bytes of SSD traffic per parameter where gradients find no room
            in host memory; or ``"speculation"``, updates in the backward pass, done again in steps that are clipped,
            which costs 2, and needs two slots, ``commit_every=1`` and a single rank. ``"auto"`` takes the planner's
            choice, if ``automatic`` lets it choose; else deferral. The same numbers.
        deferred_fraction: part of the blocks, spread over the stack, that are updated during the next forward pass: the
            same numbers, and a shorter step where computing and the SSDs take about as long. Costs host memory for
            their gradients.
        kept_activations: outputs of operators inside the blocks that are kept for the backward pass instead of computed
            again, on the device, the host or the SSDs, wherever there is room: so many bytes (or ``"64MiB"``) of each
            block and micro-batch, those that save the most computing per byte; or a :class:`fuyou.ActivationPolicy`.
            The same numbers, and a shorter step where computing is the bound.
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
        on_nonfinite: what becomes of a step whose loss or gradient is NaN or infinite. ``"stop"`` raises NonFiniteLoss;
            ``"skip"`` leaves it out, and weights and moments stay as they are, exactly. For that, updates are deferred
            or speculative (``clip_by``) as with ``max_grad_norm``, at the same cost.
        single_slot: half the space, no protection: a crash in the middle of a step loses the run.
        resume: continue the run that the directories hold.
        overwrite: replace the run that the directories hold.
        io: ``"posix"``, which ``"auto"`` takes: all traffic goes through host memory, which kvikio reaches by the same
            calls; or ``"kvikio"``, which is checked and not used further.
        batch_shape: (sequences, tokens per sequence) of the batches to come; without it, buffers are planned for one
            micro-batch and made again if the first batch is larger.
        adapters: train these and freeze the weights: a configuration of ``peft``, or the few settings of
            :class:`common.models.adapters.options.AdapterOptions`. Frozen weights take 2 bytes per parameter on SSD
            (4 in fp32) and are only read; adapters and their states are fp32, live in host memory, and are committed.
        trainable: train only parameters with these names (``*`` stands for anything) and freeze the others likewise.
        frozen_dtype: ``"int8"`` or ``"nf4"`` keeps frozen matrices of the blocks in 1.016 or 0.5625 bytes per parameter
            on SSD, on their way and in the host's cache; they are brought back into ``dtype`` on the device. Not
            lossless: every weight is rounded once, when the store is made. ``"checkpoint"`` keeps them in the bytes of
            a compressed checkpoint (FP8, MXFP4, compressed-tensors), which is lossless, and ``"plain"`` in ``dtype``.
            None takes ``"checkpoint"`` where the checkpoint is compressed, else ``"plain"``.
        freeze_vision_tower, freeze_multi_modal_projector: what of a vision-language model is not trained, where neither
            ``trainable`` nor ``adapters`` say it. What is frozen of both stays on the device for the whole run.
        images: plan memory for batches with images from the start. Without it, that happens when the first one comes.
        automatic: let the planner choose ``deferred_fraction``, ``kept_activations`` and ``clip_by`` where they are not
            given, by simulation of this run on this machine. Needs ``batch_shape`` and a profile of this machine with
            this model (``finetune --profile``); without one nothing is chosen. Costs 0.1 to 3 s at the start, and
            changes no number. Of several ranks the first one chooses for all, by its own profile and the links between
            them, which are measured (a second).
        topology: the other ranks, if there are any (an ``fcdp.Topology``). Every rank makes an engine, with directories
            of its own and otherwise alike, gives it its own part of every batch, and calls everything that the others
            call. Every node keeps one copy of the parameters, of which each of its M ranks stores 1/M; optimizer states
            are spread over all W ranks. ``host_memory`` and ``host_cache`` are those of the node. An error on one rank
            leaves the others waiting for it: end their processes, as torchrun does.
        router_loss: whether a mixture of experts' load-balancing loss is a part of the loss, as it is in transformers
            where the configuration has ``output_router_logits`` on: ``"auto"`` goes by the configuration, ``"on"`` and
            ``"off"`` do not. With the family's own coefficient. It is that of the whole batch of all ranks, however
            that is split.
        leave_ssd: with ``resume``, directories of drives that the run may be on and is to leave. A run that is on other
            drives than ``ssd`` moves there first, crash-safely: it is copied, and the copy is read again.
        prove: show first, on a small model of the same family, that training it out of core gives the losses and
            gradients that it has in memory (:func:`fuyou.prove`: a second or two, once for each family and version).
            Of several ranks the first one does it for all.
        packed: whether batches are going to have several documents in a row, with ``position_ids`` that start again:
            then it is shown for such rows, too.

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
        dtype: str = AUTO,
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
        on_nonfinite: str = "stop",
        single_slot: bool = False,
        resume: bool = False,
        overwrite: bool = False,
        io: str = "auto",
        batch_shape: tuple[int, int] | None = None,
        kept_activations: ActivationPolicy | int | str | None = None,
        adapters: PeftConfig | AdapterOptions | None = None,
        trainable: Sequence[str] | None = None,
        frozen_dtype: str | None = None,
        freeze_vision_tower: bool = True,
        freeze_multi_modal_projector: bool = True,
        images: bool = False,
        automatic: bool = False,
        topology: ClusterTopology | None = None,
        leave_ssd: Sequence[str | os.PathLike[str]] = (),
        router_loss: str = "auto",
        prove: bool = True,
        packed: bool = False,
    ):
        self._nonfinite = NonFinitePolicy(on_nonfinite)
        check_max_grad_norm(max_grad_norm)
        if self._nonfinite.skips:
            max_grad_norm = max_grad_norm or math.inf  # never reached, but known before any update counts
        self._options = EngineConfig(
            Precision.named(DEFAULT if dtype == AUTO else dtype, optimizer_dtype),
            AdamConfig(lr, betas, eps, weight_decay),
            max_grad_norm, clip_by_named(clip_by), math.inf, deferred_fraction, micro_batch, commit_every,
            None if host_cache is None else parse_bytes(host_cache), single_slot, io, seed,
            kept_activations if isinstance(kept_activations, ActivationPolicy) else parse_bytes(kept_activations or 0),
            adapters.peft_config() if isinstance(adapters, AdapterOptions) else adapters,
            None if trainable is None else tuple(trainable), FrozenDtype.named(frozen_dtype), router_loss,
            TowerFreezing(freeze_vision_tower, freeze_multi_modal_projector),
        )  # fmt: skip
        self.lr = lr
        self._images = images
        self._closed = False
        self._link: OptimizerLink | None = None
        self._opened: Runtime | None = None
        self._files: RunFiles | None = None
        self._step: StepComputation | TimedComputation | None = None
        self._in_flight = False
        self._agreement: Agreement | None = None
        self._items: int | None = None  # labels in the batches of all ranks, where there are several
        self._meter = PeakMeter(self._pids)
        try:
            self._ssd, leaving = [Path(path) for path in ssd], [Path(path) for path in leave_ssd]
            usable_directories([*self._ssd, *leaving])
            if leaving and not resume:
                raise UserError("leave_ssd is for a run that goes on: leave it out.")
            self.config, self._checkpoint = load_config(model)
            self._device = open_device(device)
            self.emulated = isinstance(self._device, EmulatedDevice)
            share = share_of(topology)
            topology = self._topology = topology if share.world_size > 1 else None  # one rank alone is alone
            self._agreement = Agreement(share) if topology is not None else None
            folders = [path / run_name for path in self._ssd]
            left = [path / run_name for path in leaving]
            if dtype == AUTO:
                self._choose_dtype([*folders, *left, *self._ssd] if resume else [])
            self._cluster_options(share)
            self._options.check_clipping(share.world_size)
            self._limits = self._smallest(memory_limits(self._device, host_memory, device_memory, share.ranks_per_node))
            self._device.cap_memory(self._limits[1])
            self._link = OptimizerLink()  # imports PyTorch while the model is built
            if prove and not self.emulated:
                self._prove(packed)
            self._link.wait_until_up()
            self._meter.start()
            self._open_model()
            if automatic and batch_shape is not None:
                clip_statistics = ClipStatistics.of_run(folders) if resume else ClipStatistics()
                choice = self._choose(batch_shape, clip_statistics)
                self._options = self._options if choice is None else choice.complete(self._options)
            self._open_runtime(batch_shape)
            self._open_run(Drives(folders, left), resume, overwrite)
        except BaseException:
            self.close()
            raise

    # -- opening --------------------------------------------------------------------------------------------------

    def _prove(self, packed: bool) -> None:
        """See that this family can be trained out of core.

        Raises:
            UserError: it cannot.
        """
        options, refusal = self._options, None
        if share_of(self._topology).rank == 0:
            try:
                prove_family(
                    self.config, adapters=options.adapters, trainable=options.trainable, packed=packed,
                    router_loss=options.router_loss, dtype=options.precision.dtype,
                )  # fmt: skip
            except UserError as error:
                refusal = error
        if self._agreement is not None:
            told = self._agreement.all_gather_object(None if refusal is None else str(refusal))[0]
            refusal = refusal or (None if told is None else UserError(told))
        if refusal is not None:
            raise refusal

    def _choose_dtype(self, continued: Sequence[Path]) -> None:
        """Compute in what suits the device, or in what the run that is ``continued`` began with; all ranks alike."""
        kind = "meta" if self.emulated else self._device.torch_device.type
        all_gather_object = (lambda value: [value]) if self._agreement is None else self._agreement.all_gather_object
        chosen = dtype_of_all(stored_dtype(continued), kind, all_gather_object)
        moments = self._options.precision.optimizer_dtype
        self._options = replace(self._options, precision=Precision(DTYPES[chosen], moments))

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

    def _smallest(self, limits: tuple[int, int]) -> tuple[int, int]:
        """The smallest budgets of all ranks: they must plan alike, for their collectives to match."""
        if self._agreement is None:
            return limits
        hosts, devices = zip(*self._agreement.all_gather_object(limits), strict=True)
        return min(hosts), min(devices)

    def _open_model(self) -> None:
        options = self._options
        torch.manual_seed(options.seed)
        self._model = OpenModel(
            self.config, options.precision, self._device.torch_device, options.adapters, options.trainable,
            options.frozen_dtype, options.seed, options.router_loss, self._checkpoint, options.towers, self._images,
        )  # fmt: skip
        share = share_of(self._topology)
        self._source = self._model.weights()
        self._stack, self._shape = self._model.stack, self._model.shape.shared(share)
        if share.rank:
            torch.manual_seed(options.seed + share.rank)  # what drops out differs, as the sequences do
        self.parameters, self.trainable_parameters = self._model.parameters, self._model.trainable_parameters

    def _choose(self, batch_shape: tuple[int, int], clip_statistics: ClipStatistics) -> Choice | None:
        training = training_of_run(self._options, self._model, self._shape, batch_shape, clip_statistics)
        prospect = PlannerContext(training, self._device, self._limits, self._ssd)
        if self._agreement is None or self._topology is None:
            return choose(prospect)
        return choose_together(prospect, self._topology, self._agreement)

    def _open_runtime(self, batch_shape: tuple[int, int] | None) -> None:
        """Plan memory, and see whether the machine has it."""
        assert self._link is not None
        throttle = self._device.spec.throttle if isinstance(self._device, EmulatedDevice) else None
        runtime = self._opened = Runtime(
            self._options, self._model, self._shape, self._device, self._limits, self._link, self._topology, throttle
        )
        self._link = None  # it is the runtime's now
        context = getattr(self.config.get_text_config(), "max_position_embeddings", None) or 2048
        runtime.plan(*(batch_shape or (self._options.micro_batch or 1, min(context, 2048))))
        self._check_memory()

    def _check_memory(self) -> None:
        """Compare what all ranks of this machine are going to take with what there is, before any of them takes it.

        Raises:
            UserError: it is not there.
        """
        ranks, available = share_of(self._topology).ranks_per_node, memory_available_bytes()
        if self._agreement is not None:
            available = min(
                self._agreement.all_gather_object(available)
            )  # when all have looked: they stop together, or none does
        needed = self.memory_plan.host_bytes * ranks
        if needed > available:
            among = f" ({ranks} ranks with {format_bytes(self.memory_plan.host_bytes)} each)" if ranks > 1 else ""
            raise UserError(
                f"This run would take {format_bytes(needed)} of host memory{among}, and {format_bytes(available)} are "
                "available (other programs and control groups counted): the system would end it on the way. Lower "
                "--host-memory, or end what takes the memory."
            )

    def _open_run(self, drives: Drives, resume: bool, overwrite: bool) -> None:
        """Open or make what is on the SSDs, and start the workers."""
        options, slots = self._options, 1 if self._options.single_slot else 2
        layout = Layout(len(drives.folders))
        self._extents = allocate_extents(layout, self._shape.records, slots)
        wanted = TrainingState(
            0, 0, "", self._model.fingerprint, str(options.precision.dtype),
            str(options.precision.optimizer_dtype), slots, emulated=self.emulated,
        )  # fmt: skip
        runtime = self._runtime
        # Everything goes through host memory, so there is nothing for "auto" to measure.
        io: dict[str, Any] = {"io": "posix" if options.io == "auto" else options.io, "throttle": runtime.throttle}
        if resume:
            regroup(drives, self._model.shape, wanted, self._agreement)
            self._files = resume_run(drives, wanted, self._agreement, **io)
            restore_random_states(self._files.state.random, self._device.torch_device)
        else:
            self._files = create_run(drives.folders, layout, wanted, self._agreement, overwrite, **io)
        store, state = self._files.store, self._files.state
        sums = RecordSums(self._shape.records, self._extents, sealed_records(store, state) if resume else ())
        self._commits = self._make_commits(self._files, sums)
        self.step_count, self._nonfinite.skipped = state.step, state.skipped
        self.user_state: dict[str, Any] = dict(state.user)
        runtime.attach(self._files, self._extents)
        runtime.open(self._commits)
        self.created_bytes = 0 if resume else self._fill()
        if resume and self._agreement is not None:
            self._commits.write_manifest()  # a step that this rank alone had committed does not count
        if self._agreement is not None:
            self._agreement.all_gather_object(None)
        if self._model.adapters is not None:
            self._model.adapters.forget_initial_values()

    def _fill(self) -> int:
        """Write the first values and commit them; returns the bytes written."""
        assert self._files is not None
        runtime, store, state = self._runtime, self._files.store, self._commits.state
        with runtime.io.not_counted():
            fill_store(runtime.plane, self._source, 0)
        store.sync({extent.file for places in self._extents for extent in places.parameters[:1]})
        state.random = random_states(self._device.torch_device)
        self._commits.seal()
        return runtime.io.other[1]

    def _make_commits(self, files: RunFiles, sums: RecordSums) -> Commits:
        single_slot = self._options.single_slot
        arguments = files.store, files.state, single_slot, sums, MissedUpdates(self._shape.records, files.state.missed)
        if self._agreement is None:
            return Commits(*arguments)
        return ClusterCommits(self._agreement, files.run, self._checksum, *arguments)

    def _checksum(self, step: int) -> int:
        """Of the parameters that this rank stores, as ``step`` has left them."""
        ranks = self._runtime.plane.ranks
        assert ranks is not None
        return ranks.take_checksum(step)

    @property
    def _runtime(self) -> Runtime:
        """The runtime, which is there once the model is open."""
        assert self._opened is not None
        return self._opened

    @property
    def memory_plan(self) -> MemoryPlan:
        """How the budgets are divided."""
        return self._runtime.memory_plan

    @property
    def lr(self) -> float:
        """Learning rate of the steps to come; may be set before each.

        Raises:
            UserError: (when set) it is NaN, infinite or negative.
        """
        return self._lr

    @lr.setter
    def lr(self, lr: float) -> None:
        check_learning_rate(lr)
        self._lr = lr

    # -- training -------------------------------------------------------------------------------------------------

    def __call__(self, **batch: Any) -> EngineOutput:
        """The streamed forward pass.

        Args:
            batch: ``input_ids`` and ``labels`` int64 ``[B, S]`` (-100 where no loss is wanted; not shifted, unless the
                family's own loss wants them so: BART's kind compares a position with the label at the same place; of
                a sequence classifier ``[B]``);
                optionally ``position_ids`` ``[B, S]`` (restarting at each document of a packed row) or
                ``attention_mask``, and whatever else the model's own forward takes: of images, what the family's
                processor returns (``pixel_values``, ``image_grid_thw``, ...), as lists with one entry for each
                sequence (see :mod:`common.data.rows`).

        Raises:
            NonFiniteLoss: the loss is NaN or infinite; the last committed step is intact.
            UserError: the batch does not fit the budgets, or documents of a row would see each other.
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
        adam = replace(self._options.adam, lr=self.lr)
        self._commits.begin(Update(step, adam, 1.0, self._options.seed, skipped=self._nonfinite.skipped))
        shape = self._runtime.batch_shape(*batch["input_ids"].shape)
        self._in_flight = True  # before the schedule changes: an interrupt may come at any point
        waits = self._commits.clip_statistics(self.step_count).share > self._options.most_clipped
        tasks = self._runtime.scheduler.training_step(
            step, shape, commit=step % self._options.commit_every == 0, defer_all=waits
        )
        self._step = self._computation(plane, tasks, batch, began)
        self._runtime.submit(tasks)
        self._step.forward()
        loss = self._step.loss = self._whole_loss(self._step)
        if not self._nonfinite.skips:
            self._should_skip_step(step, loss, 0.0)
        return EngineOutput(streamed_loss(loss, self._step.backward), _aux_loss(self._step))

    def step(self) -> StepReport:
        """End the step: its updates (if deferred) and its commit may go on while the next step runs.

        Raises:
            NonFiniteLoss: the gradient is not finite; the step is not committed.
        """
        current = self._step
        if current is None or not current.complete:
            raise FinetuneError("engine.step() comes after engine(**batch).loss.backward().")
        step = self.step_count + 1
        assert current.tasks.end is not None
        norm = self._gradient_norm(current)
        limit = self._options.max_grad_norm or math.inf
        skipped = self._should_skip_step(step, current.loss, norm)
        clipped = not skipped and norm > limit
        if skipped:
            self._commits.leave_out(step)
        elif clipped:
            # As torch.nn.utils.clip_grad_norm_ does it.
            self._commits.scale_gradients(step, limit / (norm + 1e-6))
        self.step_count = step
        self._commits.end(step, self._nonfinite.skipped, self._device.torch_device, self.user_state)
        self._runtime.plane.executor.finish(current.tasks.end)
        again = False
        if self._options.speculates:
            again = (clipped or skipped) and self._runtime.scheduler.speculative
            self._runtime.submit(self._runtime.scheduler.settle(step, clipped or skipped))
        self._step = None
        self._in_flight = False
        seconds = time.monotonic() - current.began
        times = self._runtime.accounting.take()
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
            skipped=skipped,
            aux_loss=_aux_loss(current),
            updated_again=again,
            task_seconds=times.tasks,
        )

    def _should_skip_step(self, step: int, loss: float, norm: float) -> bool:
        """Whether ``step`` is to change nothing.

        Raises:
            NonFiniteLoss: it is not finite, and training stops.
        """
        if not (math.isfinite(loss) and math.isfinite(norm)):
            self._finish_earlier_commit()
        return self._nonfinite.should_skip_step(step, loss, norm, self.committed_step)

    @torch.no_grad()
    def eval_loss(self, **batch: Any) -> float:
        """Mean loss over a batch, forward only; nothing changes but pending updates, which are applied first."""
        self.flush()
        plane = self._prepare(batch)
        tasks = self._evaluation(batch)
        computation = self._computation(plane, tasks, batch, time.monotonic())
        self._run_forward(computation, tasks)
        return self._whole_loss(computation)

    def _evaluation(self, batch: dict[str, Any]) -> StepList:
        """The tasks of a forward pass that changes nothing."""
        return self._runtime.scheduler.evaluation(self.step_count, self._runtime.batch_shape(*batch["input_ids"].shape))

    def _run_forward(self, computation: StepComputation | TimedComputation, tasks: StepList) -> None:
        """A forward pass alone, without dropout."""
        self._stack.model.eval()
        try:
            self._runtime.submit(tasks)
            computation.forward()
        except BaseException:
            # What waits for the rest of this pass must not wait for ever: nobody looks at what it leaves behind.
            for task in tasks.tasks:
                if task.op is Op.COMPUTE and not task.done:
                    self._runtime.plane.executor.finish(task)
            raise
        finally:
            self._runtime.accounting.take()
            self._stack.model.train()

    def _whole_loss(self, computation: StepComputation | TimedComputation) -> float:
        """The sum of what all ranks have found, added in fp32 in their order, and the router loss of all together."""
        router = computation.router
        own = (computation.loss, [] if router is None else router.told())
        told = [own] if self._agreement is None else self._agreement.all_gather_object(own)
        total, *others = (torch.tensor(loss, dtype=torch.float32) for loss, _ in told)
        for other in others:
            total += other
        if router is not None:
            router.settle([sums for _, sums in told])
            total += router.share
        return float(total)

    def _gradient_norm(self, current: StepComputation | TimedComputation) -> float:
        """Of the gradient summed over all ranks."""
        if self._agreement is None or self.emulated:
            return current.gradient_norm()
        plane = self._runtime.plane
        assert plane.ranks is not None
        reductions = [task for task in current.tasks.tasks if task.op in (Op.GRADIENT_REDUCE, Op.GRADIENT_EXCHANGE)]
        plane.executor.wait(reductions)
        self._device.synchronize()
        squares = plane.ranks.take_squares(current.tasks.step)
        return math.sqrt(sum(self._agreement.all_gather_object(float(squares))))

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
        if not self._model.task_type.generates:
            raise UserError(f"This model is {self._model.task_type.value}: it does not say how a sequence goes on.")
        if input_ids.dim() != 2 or input_ids.shape[0] != 1 or not input_ids.numel():
            raise UserError(f"next_logits takes one sequence, [1, tokens], not {list(input_ids.shape)}.")
        self.flush()
        batch = {"input_ids": input_ids, "labels": input_ids}
        plane = self._fitting_plane(batch)
        tasks = self._evaluation(batch)
        computation = NextToken(
            self._stack, plane, tasks, batch, self.memory_plan, self._runtime.recomputations, time.monotonic()
        )
        self._run_forward(computation, tasks)
        return computation.logits

    def flush(self) -> None:
        """Apply what is pending and commit the last step; returns when it is on SSD."""
        if self._opened is None or not self._opened.is_open:
            return
        if self._step is not None:
            raise FinetuneError("A step is under way: call loss.backward() and engine.step() first.")
        uncommitted = self.step_count != self._commit_requested()
        if self._runtime.scheduler.pending or uncommitted:
            self._runtime.submit(self._runtime.scheduler.flush(self.step_count, commit=True))
        self._runtime.plane.executor.drain()

    def _computation(
        self, plane: DataPlane, tasks: StepList, batch: dict[str, Any], began: float
    ) -> StepComputation | TimedComputation:
        if isinstance(self._device, EmulatedDevice):
            return TimedComputation(self._device, plane.executor, tasks, batch["input_ids"].numel(), began)
        return StepComputation(
            self._stack, plane, tasks, batch, self.memory_plan, self._runtime.recomputations, began, self._items,
            self._model.router_loss, self._model.task_type,
        )  # fmt: skip

    def _commit_requested(self) -> int:
        """The newest step whose commit is done or among the submitted tasks."""
        submitted = self._runtime.scheduler.commit_step
        return submitted if submitted is not None else self.committed_step

    def _prepare(self, batch: dict[str, Any]) -> DataPlane:
        """Check the batch, and find room for it."""
        if self._closed:
            raise FinetuneError("The engine has been closed.")
        per_row = self._model.task_type is TaskType.SEQUENCE_CLASSIFICATION
        for name, dims in (("input_ids", 2), ("labels", 1 if per_row else 2)):
            if batch.get(name) is None or batch[name].dim() != dims or batch[name].is_floating_point():
                shape = "[sequences, tokens]" if dims == 2 else "[sequences], one class each"
                raise UserError(f"A batch needs {name}, int64 of shape {shape}.")
        if restarts(batch.get("position_ids")):
            mask = batch.get("attention_mask")
            self._stack.family.check_documents(masked=mask is not None and mask.dim() == 2)
        items = self._count_labels(batch)
        if not items:
            raise UserError("No token of this batch has a label (all are -100): there is nothing to learn from it.")
        self._items = items if self._agreement is not None else None
        return self._fitting_plane(batch)

    def _count_labels(self, batch: dict[str, Any]) -> int:
        """In the batches of all ranks."""
        items = int((targets_of(batch["labels"], self._stack.family.shifts_labels) != -100).sum())
        return items if self._agreement is None else sum(self._agreement.all_gather_object(items))

    def _fitting_plane(self, batch: dict[str, Any]) -> DataPlane:
        """Buffers in which the batch has room, on every rank."""
        rows, seq_len = batch["input_ids"].shape
        images = holds_images(batch)
        if self._agreement is not None:  # all or none of the ranks make their buffers anew
            told = self._agreement.all_gather_object((rows, seq_len, images))
            rows, seq_len, images = (max(sizes) for sizes in zip(*told, strict=True))
        if not self._runtime.fits(rows, seq_len, images):
            self.flush()
            self._runtime.fit(rows, seq_len, images)
        return self._runtime.plane

    # -- committing -----------------------------------------------------------------------------------------------

    def _finish_earlier_commit(self) -> None:
        """Let the previous step's commit, which runs beside this one, come to its end."""
        if self._runtime.is_open:
            self._runtime.plane.executor.wait(self._commits.under_way(self.step_count + 1))

    @property
    def committed_step(self) -> int:
        """The step that ``resume`` would continue from."""
        return self._commits.committed_step

    # -- reading --------------------------------------------------------------------------------------------------

    def _reader(self) -> StoreReader:
        assert self._files is not None
        slot = self._commits.state.slot
        places = (self._files.store, self._shape, self._extents, self.memory_plan.chunk_elements, slot)
        return StoreReader(*places) if self._topology is None else ClusterReader(self._topology, *places)

    def named_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every parameter's name and fp32 master weight (or frozen value), read from the store one at a time."""
        self.flush()
        with self._runtime.io.not_counted():
            yield from self._reader().masters()

    def save_pretrained(
        self, directory: str | os.PathLike[str], *, merge: bool = False, allow_nonfinite: bool = False
    ) -> None:
        """Export what was trained: a Hugging Face checkpoint in the compute dtype, or a PEFT adapter directory.

        Record by record, and buffers are given back meanwhile, so that it stays within the host budget. Training can
        go on afterwards.

        Args:
            directory: made if it is not there; files of the same names are replaced.
            merge: write a checkpoint with the adapters merged into the weights as well, in the folder ``merged`` of
                ``directory``.
            allow_nonfinite: export tensors that hold a NaN or an infinity, too.

        Raises:
            UserError: the run is emulated: its weights mean nothing.
            NonFiniteWeights: a tensor holds a NaN or an infinity, on every rank; ``directory`` is as it was.
        """
        if self.emulated:
            raise UserError("A run on an emulated device has no weights worth keeping: nothing is exported.")
        self.flush()
        self._runtime.close()
        share, refused = self._shape.share, None
        try:
            if share.node == 0:  # whose ranks have everything together
                self._write(Path(directory), merge, share.rank == 0, allow_nonfinite)
        except NonFiniteWeights as error:  # on the rank that writes, when all others have read all
            refused = error
        name = None if refused is None else refused.name
        if self._agreement is not None:
            name = next(filter(None, self._agreement.all_gather_object(name)), None)
        if name is not None:
            raise NonFiniteWeights(name) from refused

    def _write(self, target: Path, merge: bool, writes: bool, allow_nonfinite: bool) -> None:
        """``writes``: whether this rank writes what the ranks of this node read together."""
        dtype = self._options.precision.dtype
        exporter = Exporter(
            self._model, self._reader(), self._shape, self._checkpoint, self._limits[0], writes, allow_nonfinite
        )
        with self._runtime.io.not_counted():
            if self._model.adapters is None:
                exporter.checkpoint(target, dtype)
                return
            refused = None
            try:
                if merge:  # first: if it is refused, the adapters of before stay, too
                    exporter.checkpoint(target / MERGED, dtype)
            except NonFiniteWeights as error:
                refused = error
            exporter.adapter(target, write=refused is None)  # whose records all ranks of the node read together
            if refused is not None:
                raise refused

    # -- figures --------------------------------------------------------------------------------------------------

    def model_flops_per_token(self, seq_len: int) -> float:
        """6 per parameter and token, plus attention; recomputation not counted."""
        return model_flops_per_token(self._stack.model, seq_len)

    def hardware_flops_per_token(self, seq_len: int) -> float:
        """The same with the recomputed forward pass counted."""
        return hardware_flops_per_token(self._stack.model, seq_len)

    def io_bytes(self) -> tuple[int, int]:
        """Bytes that training has read from and written to the SSDs, in all our processes."""
        return self._runtime.io.training

    def planned_io_bytes(self) -> tuple[int, int]:
        """What the schedule says that :meth:`io_bytes` comes to, once everything submitted is done."""
        return self._runtime.io.planned

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

    @property
    def clip_by(self) -> ClipBy | None:
        """How gradients are clipped, if they are."""
        return None if self._options.max_grad_norm == math.inf else self._options.clips_by

    def _pids(self) -> list[int]:
        """Of our processes, this one first."""
        link = self._link if self._opened is None else self._opened.link
        return [os.getpid()] + ([link.pid] if link is not None else [])

    # -- seeing ---------------------------------------------------------------------------------------------------

    def keep_trace(self) -> None:
        """From the next step on, keep what happens in the newest step, for :meth:`write_trace`."""
        self._runtime.keep_trace()

    def write_trace(self, path: str | os.PathLike[str]) -> None:
        """Write the newest step's tasks as a Chrome trace; they are brought to their end first.

        Raises:
            UserError: no step was taken since :meth:`keep_trace`, or the file cannot be written.
        """
        self.flush()
        self._runtime.write_trace(Path(path))

    # -- closing --------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Stop. A step in flight is discarded, a finished one is committed; ``resume`` continues from there."""
        if self._closed:
            return
        runtime = self._opened
        try:
            if runtime is not None and runtime.is_open and runtime.plane.executor.failure is None:
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
                for part in (self._agreement, self._files, self._link, runtime):
                    if part is not None:
                        stack.callback(part.close)

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close()


def _aux_loss(computation: StepComputation | TimedComputation) -> float | None:
    """The router loss of a pass that has one."""
    return None if computation.router is None else computation.router.value
