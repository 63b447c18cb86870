"""The job that a plan is made for: a model, a batch, and settings, without weights; and pieces for its blocks."""

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
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
    config: PreTrainedConfig
    stack: StreamedModel  # The model, on the meta device
    shape: ModelLayout
    rows: int  # Sequences per step and rank
    seq_len: int
    clips: bool = False  # Whether updates wait for the gradient's norm: to clip, or to skip steps
    direct_reads: bool = False  # Whether SSD reads bypass host memory if nothing would be cached there
    micro_batch: int | None = None  # Sequences that are computed at once; None leaves it to the planner
    chunk: int | None = None  # Tokens of a row that are computed at once; None leaves it to the planner
    deferred_fraction: float | None = None  # Fraction of the blocks with deferred updates; None: chosen
    host_cache: int | None = None  # Maximum bytes of host memory that only save reading and writing; None: what is left
    piece_bytes: int | None = None  # Most bytes of a piece of a block; None: chosen if blocks do not fit
    activation_policy: ActivationPolicy | None = None  # Operator outputs to save; None: chosen
    commit_every: int = 1
    # Days that the drives' warranted writes must last; 0: any; None: write least among nearly the fastest.
    drive_life: float | None = None
    clip_by: ClipBy | None = None  # Way in which gradients are clipped, if they are; None leaves it to the planner
    clipped_share: float = ClipStatistics().share  # Expected share of clipped steps; 0 without clipping
    loss: LossInputs = ENGINE_LOSS  # What the loss is computed from, if the caller computes it
    attended: int | None = None  # Tokens that each token attends to; None: all of a row

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
        return speculation_obstacle(commit_every=self.commit_every, ranks=self.shape.share.world_size)

    @property
    def clip_choices(self) -> tuple[ClipBy, ...]:
        """Return the ways in which gradients may be clipped."""
        if not self.clips or self.speculation_obstacle is not None:
            return (ClipBy.DEFERRAL,)
        return tuple(ClipBy) if self.clip_by is None else (self.clip_by,)

    @property
    def block_parameters(self) -> float:
        """Return the parameters in all blocks that a token is multiplied with."""
        return sum(self.shape.active_parameters(layer) for layer in range(len(self.shape.blocks)))

    @property
    def parameters(self) -> int:
        return self.shape.parameters

    @property
    def tokens(self) -> int:
        """Return the tokens of one step, on all ranks together."""
        return self.rows * self.seq_len * self.shape.share.world_size

    def among(self, share: Share) -> "TrainingJob":
        """Return one rank's part of this job; the batch is divided as evenly as possible."""
        return replace(self, shape=self.shape.shared(share), rows=-(-self.rows // share.world_size))

    @cached_property
    def causal(self) -> "TrainingJob":
        """Return the job with FLOPs of attention to earlier tokens only, as rows in chunks compute it: half as many."""
        return replace(self, attended=self.seq_len // 2)

    @property
    def record_bytes(self) -> int:
        """Return the bytes of parameters and states on SSD, in all slots."""
        return sum(
            (record.parameter_nbytes + record.state_nbytes) * (SLOTS if record.trainable else 1)
            for record in self.shape.records
        )


def training_job_of_run(
    config: EngineConfig,
    model: OpenModel,
    shape: ModelLayout,
    batch_shape: tuple[int, int],
    clip_statistics: ClipStatistics,
) -> TrainingJob:
    """Return the planner's view of an engine's run.

    Args:
        batch_shape: (sequences, tokens per sequence).
        clip_statistics: how often gradients were clipped so far.
    """
    return TrainingJob(
        type(model.stack.model).__name__,
        model.config,
        model.stack,
        shape,
        *batch_shape,
        **planned_options(config) | {"piece_bytes": shape.piece_bytes},
        clipped_share=clip_statistics.share,
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
        "activation_policy": config.kept_activations if isinstance(config.kept_activations, ActivationPolicy) else None,
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
        type(opened.stack.model).__name__ if isinstance(model, PreTrainedConfig) else os.fspath(model),
        config,
        opened.stack,
        replace(opened.shape, padded=padded),
        rows,
        seq_len,
        **settings,
    )


PARTS = (2, 4, 8, 16, 32, 64, 128)  # Numbers of pieces that are tried for the largest block
BUFFERS = 4  # Device buffers that pieces should have: two ahead of their use, two in use


def fitting_layout(
    stack: StreamedModel, shape: ModelLayout, plan: Callable[[ModelLayout], MemoryPlan], cut: bool = True
) -> ModelLayout:
    """Return ``shape`` if its blocks fit into memory, else the model with blocks in pieces that fit.

    Pieces are as large as possible without taking memory from micro-batches, because fewer micro-batches read
    parameters less often. Among equally good sizes, those with the most bytes on the device are best: uploads overlap
    longer computations, and more pieces are still there for the next micro-batch. Larger pieces win ties.

    Args:
        plan: returns the memory plan of a layout.
        cut: whether blocks may be in pieces.

    Raises:
        UserError: if nothing fits; says how much would.
    """
    try:
        plan(shape)
        return shape
    except UserError as error:
        if shape.orders or not cut:
            raise
        too_small = error
    largest = shape.block_elements * shape.precision.parameter_bytes
    layouts: list[tuple[tuple[int, ...], ModelLayout]] = []
    divided: ModelLayout | None = None
    for parts in PARTS:
        try:
            before, divided = divided, in_pieces(stack, shape, largest // parts)
        except UserError as error:
            raise UserError(f"{too_small} And they cannot be in pieces: {error}") from error
        if before is not None and len(before.records) == len(divided.records):
            continue  # nothing of it can be cut further
        try:
            fitting = plan(divided)
        except UserError as error:
            too_small = error
            continue
        batch, buffers = fitting.batch, fitting.counts.device_blocks
        on_device = buffers * divided.sizes[Kind.BLOCK].device_nbytes
        passes = batch.passes_in_pieces(bool(shape.sizes[Kind.BLOCK].trained_elements))
        layouts.append(((-passes, min(buffers, BUFFERS), on_device, batch.micro_rows), divided))
    if not layouts:
        raise too_small
    most = max(rank for rank, _ in layouts)
    return next(layout for rank, layout in layouts if rank == most)


def fitting_job(job: TrainingJob, device_bytes: int, host_bytes: int, cpu: bool) -> TrainingJob:
    """Return ``job`` with blocks in pieces, if they are too large for the machine or the job requests pieces.

    Args:
        device_bytes, host_bytes: memory that it may use.
        cpu: whether the CPU is the device, so that both are one memory.

    Raises:
        UserError: if nothing fits (says how much would), or only pieces fit and the loss needs a reference.
    """
    if job.shape.orders:
        return job

    def plan(layout: ModelLayout) -> MemoryPlan:
        planner = MemoryPlanner(layout, job.config, device_bytes, host_bytes, cpu, host_cache=job.host_cache)
        return planner.plan(job.rows, job.seq_len, job.micro_batch, job.loss, job.chunk)

    if job.piece_bytes is not None:
        shape = in_pieces(job.stack, job.shape, job.piece_bytes)
    else:
        shape = fitting_layout(job.stack, job.shape, plan, cut=job.chunk is None)
    if job.loss.reference:
        check_whole_blocks(shape)
    return replace(job, shape=shape)
