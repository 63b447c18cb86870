"""The engine's options, validated, and what the planner chooses of those that were left open."""

import math
from dataclasses import dataclass, replace

from peft import PeftConfig

from common.errors import UserError
from common.models.flops import hardware_flops_per_token, model_flops_per_token
from common.models.vision.towers import DEFAULT_FREEZING, TowerFreezing
from fuyou.layout.deferred import interleaved
from fuyou.layout.frozen_weights import FrozenDtype
from fuyou.layout.model_layout import StepShape
from fuyou.layout.record import Precision
from fuyou.model.open_model import OpenModel
from fuyou.optimizer.adam import AdamConfig
from fuyou.optimizer.clipping import ClipBy, Strikes, speculation_obstacle
from fuyou.planner import Choice, Training
from fuyou.recompute.policy import Keeping


@dataclass(frozen=True)
class EngineConfig:
    """Options of :class:`fuyou.Engine`, validated."""

    precision: Precision
    adam: AdamConfig
    max_grad_norm: float | None
    clip_by: ClipBy | None
    """None leaves it to the planner; without one, it is deferral."""
    most_clipped: float
    """Share of the steps up to which speculation pays: while more of them are clipped, all updates are deferred."""
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
    frozen_dtype: FrozenDtype | None
    """None leaves it to the checkpoint."""
    router_loss: str
    """Whether it is a part of the loss, see :mod:`fuyou.model.router_loss`."""
    towers: TowerFreezing = DEFAULT_FREEZING

    def __post_init__(self) -> None:
        checks = {
            "micro_batch": self.micro_batch is None or self.micro_batch > 0,
            "commit_every": self.commit_every > 0,
            "max_grad_norm": self.max_grad_norm is None or self.max_grad_norm > 0,
            "deferred_fraction": 0 <= self.deferred_fraction <= 1,
            "kept_activations": isinstance(self.kept_activations, Keeping) or self.kept_activations >= 0,
        }
        for name, good in checks.items():
            if not good:
                raise UserError(f"{name} must be positive, not {getattr(self, name)}.")

    def check_clipping(self, ranks: int) -> None:
        """See whether gradients can be clipped as asked for.

        Raises:
            UserError: they cannot.
        """
        why = speculation_obstacle(single_slot=self.single_slot, commit_every=self.commit_every, ranks=ranks)
        if self.speculates and why is not None:
            raise UserError(f"--clip-by speculation is not possible: {why}. Leave it out, or change that.")

    @property
    def clips_by(self) -> ClipBy | None:
        """How gradients are clipped, if they are."""
        return None if self.max_grad_norm is None else self.clip_by or ClipBy.DEFERRAL

    @property
    def speculates(self) -> bool:
        """Whether updates are done before it is known whether the gradient is clipped, and again if it is."""
        return self.clips_by is ClipBy.SPECULATION

    def deferred(self, shape: StepShape) -> frozenset[int]:
        """Records whose updates wait for the next forward pass: all, if none is done before the norm is known."""
        return interleaved(shape, 1.0 if self.clips_by is ClipBy.DEFERRAL else self.deferred_fraction)

    def held(self, shape: StepShape) -> frozenset[int]:
        """Records whose gradients stay until the step has ended."""
        return frozenset(shape.trainable) if self.speculates else self.deferred(shape)

    def training(self, model: OpenModel, shape: StepShape, batch_shape: tuple[int, int], strikes: Strikes) -> Training:
        """The run as the planner knows it, which may choose what was left open.

        Args:
            shape: the model's records, as this rank shares them.
            batch_shape: (sequences, tokens per sequence).
            strikes: how often gradients were clipped so far.
        """
        module, (rows, seq_len) = model.stack.model, batch_shape
        return Training(
            type(module).__name__, model.config, model.stack, shape, rows, seq_len,
            model_flops_per_token(module, seq_len), hardware_flops_per_token(module, seq_len),
            clips=self.max_grad_norm is not None, single_slot=self.single_slot, micro_batch=self.micro_batch,
            deferred_fraction=self.deferred_fraction or None, host_cache=self.host_cache,
            keeping=self.kept_activations if isinstance(self.kept_activations, Keeping) else None,
            commit_every=self.commit_every, clip_by=self.clip_by,
            clipped_share=0.0 if self.max_grad_norm == math.inf else strikes.share,
        )  # fmt: skip

    def completed(self, choice: Choice | None) -> "EngineConfig":
        """With what was left open as it was chosen, if it was."""
        if choice is None:
            return self
        return replace(
            self, micro_batch=choice.micro_batch, deferred_fraction=self.deferred_fraction or choice.deferred_fraction,
            kept_activations=self.kept_activations or choice.keeping, clip_by=choice.clip_by,
            most_clipped=choice.most_clipped,
        )  # fmt: skip
