"""What is to be trained, as far as a plan needs to know it: no weights, no device, no drive."""

import math
import os
from dataclasses import dataclass, replace

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
from fuyou.model.streamed_model import StreamedModel
from fuyou.optimizer.clipping import ClipBy, ClipStatistics, speculation_obstacle
from fuyou.recompute.policy import ActivationPolicy


@dataclass(frozen=True)
class Training:
    """A model, a batch, and what the user has decided already."""

    name: str
    config: PreTrainedConfig
    stack: StreamedModel
    """The model, on the meta device."""
    shape: ModelLayout
    rows: int
    """Sequences per step, of each rank where there are several."""
    seq_len: int
    model_flops_per_token: float
    """Recomputation not counted."""
    hardware_flops_per_token: float
    """Every block's forward pass counted twice."""
    clips: bool = False
    """Whether no update counts before the gradient's global norm is known: to clip it, or to leave out what is not
    finite."""
    single_slot: bool = False
    micro_batch: int | None = None
    """Sequences that are computed at once; None leaves it to the planner."""
    deferred_fraction: float | None = None
    """None leaves it to the planner."""
    host_cache: int | None = None
    """Most bytes of host memory for what is only kept there to save reading and writing it; None: what is left."""
    keeping: ActivationPolicy | None = None
    """Which operator outputs are kept for the backward pass; None leaves it to the planner."""
    commit_every: int = 1
    clip_by: ClipBy | None = None
    """How gradients are clipped, if they are; None leaves it to the planner."""
    clipped_share: float = ClipStatistics().share
    """Of the steps, in which clipping is expected to strike; 0 where the norm only tells what is not finite."""

    @property
    def asks_for_norm(self) -> str:
        """The option because of which updates wait for the norm, with the value that they would not wait with."""
        return "--max-grad-norm 0" if self.clipped_share else "--on-nonfinite stop"

    @property
    def speculation_obstacle(self) -> str | None:
        """Why updates cannot be speculative, in words; None if they can."""
        share = self.shape.share
        return speculation_obstacle(
            single_slot=self.single_slot, commit_every=self.commit_every, ranks=share.world_size
        )

    @property
    def clip_ways(self) -> tuple[ClipBy, ...]:
        """How gradients may be clipped, if they are."""
        if not self.clips or self.speculation_obstacle is not None:
            return (ClipBy.DEFERRAL,)
        return tuple(ClipBy) if self.clip_by is None else (self.clip_by,)

    @property
    def block_parameters(self) -> int:
        """In all blocks together."""
        return sum(self.shape.records[index].parameter_count for index in self.shape.blocks)

    @property
    def parameters(self) -> int:
        return sum(record.parameter_count for record in self.shape.records)

    @property
    def tokens(self) -> int:
        """Of one step, of all ranks together."""
        return self.rows * self.seq_len * self.shape.share.world_size

    def among(self, share: Share) -> "Training":
        """The same batch, as nearly as it divides, on several ranks: what one of them does of it."""
        return replace(self, shape=self.shape.shared(share), rows=-(-self.rows // share.world_size))

    def with_batch(self, rows: int) -> "Training":
        """The same with another number of sequences per step."""
        return replace(self, rows=rows)

    @property
    def record_bytes(self) -> int:
        """What parameters and states take on SSD, in all slots."""
        slots = 1 if self.single_slot else 2
        return sum(
            (record.parameter_nbytes + record.state_nbytes) * (slots if record.trainable else 1)
            for record in self.shape.records
        )


def training_of_run(
    config: EngineConfig,
    model: OpenModel,
    shape: ModelLayout,
    batch_shape: tuple[int, int],
    clip_statistics: ClipStatistics,
) -> Training:
    """Return a run of the engine as the planner knows it, which may choose what was left open.

    Args:
        config: its options.
        model: that is trained.
        shape: the model's records, as this rank shares them.
        batch_shape: (sequences, tokens per sequence).
        strikes: how often gradients were clipped so far.
    """
    module, (rows, seq_len) = model.stack.model, batch_shape
    return Training(
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
        micro_batch=config.memory.micro_batch,
        deferred_fraction=config.optimizer.deferred_fraction or None,
        host_cache=config.host_cache,
        keeping=config.kept_activations if isinstance(config.kept_activations, ActivationPolicy) else None,
        commit_every=config.store.commit_every,
        clip_by=config.clip_by,
        clipped_share=0.0 if config.max_grad_norm == math.inf else clip_statistics.share,
    )


def describe_training(
    model: str | os.PathLike[str] | PreTrainedConfig,
    rows: int,
    seq_len: int,
    *,
    precision: Precision | None = None,
    clips: bool = False,
    single_slot: bool = False,
    micro_batch: int | None = None,
    deferred_fraction: float | None = None,
    host_cache: int | None = None,
    adapters: PeftConfig | None = None,
    frozen: FrozenDtype | None = None,
    towers: TowerFreezing = DEFAULT_FREEZING,
    router_loss: str = "auto",
    commit_every: int = 1,
    clip_by: ClipBy | None = None,
    clipped_share: float = ClipStatistics().share,
) -> Training:
    """Look at a model without its weights: half a second for 160 layers. (Of a compressed checkpoint whose bytes are to
    be kept, what its files say they hold is read, too.)

    Args:
        model: checkpoint directory, preset name, or transformers configuration.
        rows, seq_len: of a batch.
        precision: None computes in bf16 with fp32 moments.
        adapters: what is trained, if the weights are frozen.
        frozen: how frozen matrices are kept; None: in a compressed checkpoint's own bytes, else as they compute.
        towers: what of a vision-language model's towers is frozen.
        router_loss: see :mod:`fuyou.model.router_loss`.
        commit_every: steps from one commit to the next.
        clip_by: how gradients are clipped; None leaves it to the planner.
        clipped_share: of the steps, in which they are expected to be.

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
    )
    meta = opened.stack.model
    name = os.fspath(model) if not isinstance(model, PreTrainedConfig) else type(meta).__name__
    return Training(
        name, config, opened.stack, opened.shape, rows, seq_len, model_flops_per_token(meta, seq_len),
        hardware_flops_per_token(meta, seq_len), clips, single_slot, micro_batch, deferred_fraction, host_cache,
        commit_every=commit_every, clip_by=clip_by, clipped_share=clipped_share,
    )  # fmt: skip
