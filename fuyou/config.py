"""The engine's options, validated."""

from dataclasses import dataclass

from peft import PeftConfig

from common.errors import UserError
from common.models.vision.towers import DEFAULT_FREEZING, TowerFreezing
from fuyou.layout.deferred import interleaved
from fuyou.layout.frozen_weights import FrozenDtype
from fuyou.layout.model_layout import ModelLayout
from fuyou.layout.record import Precision
from fuyou.optimizer.adam import AdamConfig
from fuyou.optimizer.clipping import ClipBy, speculation_obstacle
from fuyou.recompute.policy import ActivationPolicy


@dataclass(frozen=True)
class EngineConfig:
    """Options of :class:`fuyou.Engine`, validated."""

    precision: Precision
    adam: AdamConfig
    max_grad_norm: float | None
    clip_by: ClipBy | None
    """None leaves it to the planner; without one, it is deferral."""
    max_clipped_share: float
    """Share of the steps up to which speculation pays: while more of them are clipped, all updates are deferred."""
    deferred_fraction: float
    """Of the blocks whose updates wait for the next forward pass, as asked for."""
    micro_batch: int | None
    commit_every: int
    host_cache: int | None
    single_slot: bool
    io: str
    seed: int
    kept_activations: ActivationPolicy | int
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
            "kept_activations": isinstance(self.kept_activations, ActivationPolicy) or self.kept_activations >= 0,
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

    def deferred(self, shape: ModelLayout) -> frozenset[int]:
        """Records whose updates wait for the next forward pass: all, if none is done before the norm is known."""
        return interleaved(shape, 1.0 if self.clips_by is ClipBy.DEFERRAL else self.deferred_fraction)

    def held(self, shape: ModelLayout) -> frozenset[int]:
        """Records whose gradients stay until the step has ended."""
        return frozenset(shape.trainable) if self.speculates else self.deferred(shape)
