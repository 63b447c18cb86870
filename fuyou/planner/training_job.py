"""The job that a plan is made for: a model, a batch, and settings, without weights; and pieces for its blocks."""

import copy
import functools
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from peft import PeftConfig
from transformers import PreTrainedConfig

from common.errors import UserError
from common.models.adapters.options import SavedAdapter
from common.models.flops import hardware_flops_per_token, model_flops_per_token
from common.models.presets import load_config
from common.models.vision import DEFAULT_FREEZING, TowerFreezing
from fuyou.config import EngineConfig
from fuyou.layout.cutting import whole_elements
from fuyou.layout.frozen_weights import FrozenDtype
from fuyou.layout.model_layout import ModelLayout
from fuyou.layout.record import SLOTS, Kind, Precision
from fuyou.layout.share import Share
from fuyou.model.open_model import OpenModel, check_whole_blocks
from fuyou.model.recompute.policy import ActivationPolicy
from fuyou.model.streamed_model import StreamedModel
from fuyou.optimizer.clipping import ClipBy, ClipStatistics, speculation_obstacle
from fuyou.pieces.division import in_pieces
from fuyou.schedule.batch import ENGINE_LOSS, LossInputs
from fuyou.schedule.memory_plan import MemoryPlan
from fuyou.schedule.memory_planner import MemoryPlanner


@dataclass(frozen=True)
class TrainingJob:
    """A model, a batch, and the settings that the user has decided."""

    name: str
    model: OpenModel
    layout: ModelLayout  # Its records as the run stores them: in pieces, or as one of several ranks sees them
    rows: int  # Sequences per step and rank
    seq_len: int
    clips: bool = False  # Whether updates wait for the gradient's norm: to clip, or to skip steps
    direct_reads: bool = False  # Whether SSD reads bypass host memory if nothing would be cached there
    micro_batch: int | None = None  # Sequences that are computed at once; None leaves it to the planner
    chunk: int | None = None  # Tokens of a row that are computed at once; None leaves it to the planner
    deferred_fraction: float | None = None  # Fraction of the blocks with deferred updates; None: chosen
    # Maximum bytes of host memory that only save reading and writing; None: what is left
    host_cache: int | None = None
    piece_bytes: int | None = None  # Most bytes of a piece of a block; None: chosen if blocks do not fit
    # Whether blocks stay whole even if they do not fit, as those of a run that has begun
    whole_blocks: bool = False
    activation_policy: ActivationPolicy | None = None  # Operator outputs to save; None: chosen
    commit_every: int = 1
    # Days that the drives' warranted writes must last; 0: any; None: write least among nearly the fastest.
    drive_life: float | None = None
    # Way in which gradients are clipped, if they are; None leaves it to the planner
    clip_by: ClipBy | None = None
    clipped_share: float = ClipStatistics().share  # Expected share of clipped steps; 0 without clipping
    loss: LossInputs = ENGINE_LOSS  # What the loss is computed from, if the caller computes it
    attended: int | None = None  # Tokens that each token attends to; None: all of a row
    reads_rows: Callable[[str], bool] | None = None  # Whether weights can be read by rows; None: all can

    @property
    def config(self) -> PreTrainedConfig:
        return self.model.config

    @property
    def stack(self) -> StreamedModel:
        return self.model.stack

    @cached_property
    def model_flops_per_token(self) -> float:
        """Return FLOPs without recomputation."""
        return model_flops_per_token(self.stack.model, self.attended or self.seq_len)

    @cached_property
    def hardware_flops_per_token(self) -> float:
        """Return FLOPs with every block's forward pass counted twice."""
        return hardware_flops_per_token(self.stack.model, self.attended or self.seq_len)

    @property
    def speculation_obstacle(self) -> str | None:
        """Return why updates cannot be speculative, or None if they can."""
        return speculation_obstacle(commit_every=self.commit_every, ranks=self.layout.share.world_size)

    @property
    def clip_choices(self) -> tuple[ClipBy, ...]:
        """Return the ways in which gradients may be clipped."""
        if not self.clips or self.speculation_obstacle is not None:
            return (ClipBy.DEFERRAL,)
        return tuple(ClipBy) if self.clip_by is None else (self.clip_by,)

    @property
    def block_parameters(self) -> float:
        """Return the parameters in all blocks that a token is multiplied with."""
        return sum(self.layout.active_parameters(layer) for layer in range(len(self.layout.blocks)))

    @property
    def parameters(self) -> int:
        return self.layout.parameters

    @property
    def tokens(self) -> int:
        """Return the tokens of one step, on all ranks together."""
        return self.rows * self.seq_len * self.layout.share.world_size

    def among(self, share: Share) -> "TrainingJob":
        """Return one rank's part of this job; the batch is divided as evenly as possible."""
        return replace(self, layout=self.layout.shared(share), rows=-(-self.rows // share.world_size))

    @cached_property
    def causal(self) -> "TrainingJob":
        """Return the job with FLOPs of attention to earlier tokens only, as rows in chunks compute it: half as many."""
        return replace(self, attended=self.seq_len // 2)

    @property
    def record_bytes(self) -> int:
        """Return the bytes of parameters and states on SSD, in all slots."""
        return sum(
            (record.parameter_nbytes + record.state_nbytes) * (SLOTS if record.trainable else 1)
            for record in self.layout.records
        )


def open_model(
    options: EngineConfig,
    config: PreTrainedConfig,
    checkpoint: Path | None,
    device: torch.device,
    draw: bool = True,
) -> OpenModel:
    """Open the model of a run with these options, whose dtype is settled.

    Args:
        checkpoint: directory of its weights; None: they are random.
        draw: whether the first values of adapters are needed.
    """
    return OpenModel(
        config,
        options.precision,
        device,
        frozen=options.frozen_dtype,
        router_loss=options.router_loss,
        images=options.memory.images,
        **adapted_as(options),
        checkpoint=checkpoint,
        draw=draw,
    )


def adapted_as(options: EngineConfig) -> dict[str, Any]:
    """Return the arguments of an :class:`AdaptedModel` that say what a run with these options trains."""
    return {
        "adapters": copy.deepcopy(options.adapters),  # which a model's own rules change
        "trainable": options.trainable,
        "seed": options.seed,
        "towers": options.towers,
        "saved": None if options.store.resume else options.saved_adapter,
    }


def job_of_run(
    name: str, options: EngineConfig, model: OpenModel, rows: int, seq_len: int, stored: Mapping[str, Any]
) -> TrainingJob:
    """Return the job of a run with these options, on one rank.

    Args:
        name: of the model, for people.
        rows, seq_len: shape of a batch.
        stored: manifest of the run that is continued; empty if there is none.
    """
    planned = planned_options(options)
    statistics = ClipStatistics()
    if options.store.resume:
        planned["piece_bytes"] = stored.get("piece_bytes")
        statistics = ClipStatistics.of_run(options.store.folders)
    return TrainingJob(
        name,
        model,
        replace(model.layout, images=options.memory.images, padded=options.memory.padded),
        rows,
        seq_len,
        **planned,
        whole_blocks=options.store.resume and planned["piece_bytes"] is None,
        clipped_share=statistics.share,
        # Weights are not opened for whole blocks; several cuts ask for the same names
        reads_rows=functools.cache(lambda name: model.weights.reads_rows(name)),
    )


def planned_options(config: EngineConfig) -> dict[str, Any]:
    """Return the fields of a :class:`TrainingJob` that the engine's options decide, by name."""
    return {
        "clips": config.optimizer.max_grad_norm is not None,
        "direct_reads": config.store.direct_reads,
        "micro_batch": config.memory.micro_batch,
        "chunk": config.memory.chunk,
        "deferred_fraction": config.optimizer.deferred_fraction or None,
        "host_cache": config.host_cache,
        "piece_bytes": config.piece_bytes,
        "activation_policy": config.saved_activations
        if isinstance(config.saved_activations, ActivationPolicy)
        else None,
        "commit_every": config.store.commit_every,
        "drive_life": config.store.drive_life,
        "clip_by": config.clip_by,
        "loss": config.loss_inputs,
    }


def describe_training(
    model: str | os.PathLike[str] | PreTrainedConfig,
    rows: int,
    seq_len: int,
    *,
    precision: Precision | None = None,
    adapters: PeftConfig | None = None,
    frozen: FrozenDtype | None = None,
    towers: TowerFreezing = DEFAULT_FREEZING,
    saved: SavedAdapter | None = None,
    router_loss: str = "auto",
    padded: bool = False,
    **settings: Any,
) -> TrainingJob:
    """Describe the training of a model without its weights, in half a second for 160 layers.

    Of a compressed checkpoint, the files' headers are read.

    Args:
        model: checkpoint directory, preset name, or transformers configuration.
        rows, seq_len: shape of a batch.
        precision: None computes in bf16.
        adapters: adapters to train while the weights are frozen.
        saved: adapters of this configuration to begin with.
        frozen: storage of frozen matrices; None for the checkpoint's bytes if compressed, else the compute dtype.
        router_loss: see :mod:`fuyou.model.loss.router_loss`.
        padded: whether batches come with a mask that hides tokens.
        settings: other fields of :class:`TrainingJob`, such as ``clips`` and ``micro_batch``.

    Raises:
        UserError: if there is no such model, or it cannot be streamed.
    """
    precision = precision or Precision(torch.bfloat16)
    config, checkpoint = load_config(model)
    opened = OpenModel(
        config,
        precision,
        torch.device("cpu"),
        adapters,
        frozen=frozen,
        router_loss=router_loss,
        checkpoint=checkpoint,
        towers=towers,
        draw=False,
        saved=saved,
    )
    return TrainingJob(
        type(opened.model).__name__ if isinstance(model, PreTrainedConfig) else os.fspath(model),
        opened,
        replace(opened.layout, padded=padded),
        rows,
        seq_len,
        **settings,
    )


PARTS = (2, 4, 8, 16, 32, 64, 128)  # Numbers of pieces that are tried for the largest block
BUFFERS = 4  # Device buffers that pieces should have: two ahead of their use, two in use


def fitting_job(
    job: TrainingJob, device_bytes: int, host_bytes: int, cpu: bool
) -> tuple[TrainingJob, MemoryPlan]:
    """Return ``job`` with blocks in pieces, if they are too large for the machine or the job requests pieces, and the
    memory of a run with default settings.

    Pieces are as large as possible without taking memory from micro-batches, because fewer micro-batches read
    parameters less often. Among equally good sizes, those with the most bytes on the device are best: uploads overlap
    longer computations, and more pieces are still there for the next micro-batch. Larger pieces win ties.

    Args:
        device_bytes, host_bytes: memory that it may use.
        cpu: whether the CPU is the device, so that both are one memory.

    Raises:
        UserError: if nothing fits (says how much would), or only pieces fit and the loss needs a reference.
    """

    def plan(fitted: TrainingJob) -> MemoryPlan:
        planner = MemoryPlanner(
            fitted.layout, job.config, device_bytes, host_bytes, cpu, host_cache=job.host_cache
        )
        return planner.plan(job.rows, job.seq_len, job.micro_batch, job.loss, job.chunk)

    if job.piece_bytes is not None and not job.layout.orders:
        fitted = _cut(job, job.piece_bytes)
        memory = plan(fitted)
    elif job.layout.orders or job.whole_blocks or job.chunk is not None:
        fitted, memory = job, plan(job)
    else:
        try:
            fitted, memory = job, plan(job)
        except UserError as error:
            fitted, memory = _largest_pieces(job, plan, error)
    if job.loss.reference:
        check_whole_blocks(fitted.layout)
    return fitted, memory


def _largest_pieces(
    job: TrainingJob, plan: Callable[[TrainingJob], MemoryPlan], too_small: UserError
) -> tuple[TrainingJob, MemoryPlan]:
    largest = job.layout.block_elements * job.layout.precision.parameter_bytes
    fitting: list[tuple[tuple[int, ...], TrainingJob, MemoryPlan]] = []
    divided: TrainingJob | None = None
    for parts in PARTS:
        try:
            before = divided
            divided = _cut(job, largest // parts)
        except UserError as error:
            raise UserError(f"{too_small} And they cannot be in pieces: {error}") from error
        if before is not None and len(before.layout.records) == len(divided.layout.records):
            continue  # nothing of it can be cut further
        try:
            memory = plan(divided)
        except UserError as error:
            too_small = error
            continue
        buffers = memory.counts.device_blocks
        on_device = buffers * divided.layout.sizes[Kind.BLOCK].device_nbytes
        passes = memory.batch.passes_in_pieces(bool(job.layout.sizes[Kind.BLOCK].trained_elements))
        rank = (-passes, min(buffers, BUFFERS), on_device, memory.batch.micro_rows)
        fitting.append((rank, divided, memory))
    if not fitting:
        raise too_small
    most = max(rank for rank, *_ in fitting)
    return next((divided, memory) for rank, divided, memory in fitting if rank == most)


def _cut(job: TrainingJob, piece_bytes: int) -> TrainingJob:
    """Return the job with blocks in pieces of at most ``piece_bytes``."""
    share = job.layout.share
    layout = in_pieces(job.stack, job.layout.shared(Share()), piece_bytes)
    if job.reads_rows is not None:
        layout = replace(layout, read_whole=whole_elements(layout.records, job.reads_rows))
    return replace(job, layout=layout.shared(share), piece_bytes=layout.piece_bytes)
