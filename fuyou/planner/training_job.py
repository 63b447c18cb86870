"""The job that a plan is made for: a model, a batch and settings, without weights, device or drives."""

import math
import os
from dataclasses import dataclass, replace
from typing import Any

import torch
from peft import PeftConfig
from transformers import PreTrainedConfig

from common.models.flops import hardware_flops_per_token, model_flops_per_token
from common.models.presets import load_config
from common.models.vision.towers import DEFAULT_FREEZING, TowerFreezing
from fuyou.config import EngineConfig
from fuyou.layout.frozen_weights import FrozenDtype
from fuyou.layout.model_layout import ModelLayout
from fuyou.layout.record import Precision
from fuyou.layout.share import Share
from fuyou.model.open_model import OpenModel
from fuyou.model.recompute.policy import ActivationPolicy
from fuyou.model.streamed_model import StreamedModel
from fuyou.optimizer.clipping import ClipBy, ClipStatistics, speculation_obstacle
from fuyou.schedule.batch import ENGINE_LOSS, LossInputs


@dataclass(frozen=True)
class TrainingJob:
    """A model, a batch, and the settings that the user has decided already."""

    name: str
    config: PreTrainedConfig
    stack: StreamedModel  # The model, on the meta device
    shape: ModelLayout
    rows: int  # Sequences per step and rank
    seq_len: int
    model_flops_per_token: float  # FLOPs without recomputation
    hardware_flops_per_token: float  # FLOPs with every block's forward pass counted twice
    # Whether no update is valid before the gradient's global norm is known: to clip it, or to skip steps that are not
    # finite.
    clips: bool = False
    single_slot: bool = False
    # Whether what host memory would not keep is read from the SSDs to the device past it: parameters, activations.
    direct_reads: bool = False
    micro_batch: int | None = None  # Sequences that are computed at once; None leaves it to the planner
    # Fraction of the blocks whose updates wait for the next forward pass; None leaves it to the planner.
    deferred_fraction: float | None = None
    host_cache: int | None = None  # Maximum bytes of host memory that only save reading and writing; None: what is left
    # Most bytes of a piece of a block; None leaves it to the planner, which cuts blocks that do not fit.
    piece_bytes: int | None = None
    # Operator outputs that are saved for the backward pass; None leaves it to the planner.
    activation_policy: ActivationPolicy | None = None
    commit_every: int = 1
    clip_by: ClipBy | None = None  # Way in which gradients are clipped, if they are; None leaves it to the planner
    # Share of the steps that are expected to be clipped; 0 if the norm only tells what is not finite.
    clipped_share: float = ClipStatistics().share
    loss: LossInputs = ENGINE_LOSS  # What the loss is computed from, if the caller computes it

    @property
    def option_without_norm(self) -> str:
        """The option, with its value, with which updates would not wait for the norm."""
        return "--max-grad-norm 0" if self.clipped_share else "--on-nonfinite stop"

    @property
    def speculation_obstacle(self) -> str | None:
        """Reason why updates cannot be speculative; None if they can."""
        share = self.shape.share
        return speculation_obstacle(
            single_slot=self.single_slot, commit_every=self.commit_every, ranks=share.world_size
        )

    @property
    def clip_choices(self) -> tuple[ClipBy, ...]:
        """Ways in which gradients may be clipped, if they are."""
        if not self.clips or self.speculation_obstacle is not None:
            return (ClipBy.DEFERRAL,)
        return tuple(ClipBy) if self.clip_by is None else (self.clip_by,)

    @property
    def block_parameters(self) -> float:
        """Parameters in all blocks together that a token is multiplied with: of experts those that it is sent to."""
        return sum(self.shape.active_parameters(layer) for layer in range(len(self.shape.blocks)))

    @property
    def parameters(self) -> int:
        return self.shape.parameters

    @property
    def tokens(self) -> int:
        """Tokens of one step, on all ranks together."""
        return self.rows * self.seq_len * self.shape.share.world_size

    def among(self, share: Share) -> "TrainingJob":
        """Return what one of several ranks does of this job; the batch divides as evenly as it can."""
        return replace(self, shape=self.shape.shared(share), rows=-(-self.rows // share.world_size))

    def with_batch(self, rows: int) -> "TrainingJob":
        """Return this job with another number of sequences per step."""
        return replace(self, rows=rows)

    @property
    def record_bytes(self) -> int:
        """Bytes of parameters and states on SSD, in all slots."""
        slots = 1 if self.single_slot else 2
        return sum(
            (record.parameter_nbytes + record.state_nbytes) * (slots if record.trainable else 1)
            for record in self.shape.records
        )


def training_job_of_run(
    config: EngineConfig,
    model: OpenModel,
    shape: ModelLayout,
    batch_shape: tuple[int, int],
    clip_statistics: ClipStatistics,
) -> TrainingJob:
    """Return a run of the engine as the planner knows it, which may choose what was left open.

    Args:
        config: its options.
        model: that is trained.
        shape: the model's records, as this rank shares them.
        batch_shape: (sequences, tokens per sequence).
        clip_statistics: how often gradients were clipped so far.
    """
    module, (rows, seq_len) = model.stack.model, batch_shape
    return TrainingJob(
        type(module).__name__,
        model.config,
        model.stack,
        shape,
        rows,
        seq_len,
        model_flops_per_token(module, seq_len),
        hardware_flops_per_token(module, seq_len),
        clips=config.max_grad_norm is not None,
        single_slot=config.store.single_slot,
        direct_reads=config.store.direct_reads,
        micro_batch=config.memory.micro_batch,
        deferred_fraction=config.optimizer.deferred_fraction or None,
        host_cache=config.host_cache,
        piece_bytes=shape.piece_bytes,
        activation_policy=config.kept_activations if isinstance(config.kept_activations, ActivationPolicy) else None,
        commit_every=config.store.commit_every,
        clip_by=config.clip_by,
        clipped_share=0.0 if config.max_grad_norm == math.inf else clip_statistics.share,
        loss=config.loss_inputs,
    )


def describe_training(
    model: str | os.PathLike[str] | PreTrainedConfig,
    rows: int,
    seq_len: int,
    *,
    precision: Precision | None = None,
    adapters: PeftConfig | None = None,
    frozen: FrozenDtype | None = None,
    towers: TowerFreezing = DEFAULT_FREEZING,
    router_loss: str = "auto",
    padded: bool = False,
    compiled: bool = False,
    **settings: Any,
) -> TrainingJob:
    """Describe the training of a model without its weights: half a second for 160 layers.

    (If the weights stay in a compressed checkpoint's own bytes, its files are read for what they hold, too.)

    Args:
        model: checkpoint directory, preset name, or transformers configuration.
        rows, seq_len: shape of a batch.
        precision: types of parameters and moments; None computes in bf16 with fp32 moments.
        adapters: adapters to train while the weights are frozen.
        frozen: how frozen matrices are stored; None: in a compressed checkpoint's own bytes, else as they compute.
        towers: which towers of a vision-language model are frozen.
        router_loss: see :mod:`fuyou.model.loss.router_loss`.
        padded: whether batches come with a mask that hides tokens.
        compiled: whether blocks run as PyTorch compiles them.
        settings: further fields of :class:`TrainingJob`, such as ``clips`` and ``micro_batch``.

    Raises:
        UserError: no such model, or one that cannot be streamed.
    """
    precision = precision or Precision(torch.bfloat16, torch.float32)
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
    )
    meta = opened.stack.model
    return TrainingJob(
        type(meta).__name__ if isinstance(model, PreTrainedConfig) else os.fspath(model),
        config,
        opened.stack,
        replace(opened.shape, padded=padded, compiled=compiled),
        rows,
        seq_len,
        model_flops_per_token(meta, seq_len),
        hardware_flops_per_token(meta, seq_len),
        **settings,
    )
