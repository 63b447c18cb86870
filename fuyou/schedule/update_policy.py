"""When the updates of a step run: in its backward pass or in the next forward pass, once or provisionally."""

from dataclasses import dataclass

from fuyou.layout.deferred import interleaved
from fuyou.layout.model_layout import ModelLayout
from fuyou.optimizer.clipping import ClipBy


@dataclass(frozen=True)
class UpdatePolicy:
    """Which updates are deferred, and which are done before the gradient's norm is known."""

    clip_by: ClipBy | None  # Way in which gradients are clipped by their global norm; None: they are not
    # Fraction of the blocks whose updates wait for the next forward pass, where clipping does not defer all.
    deferred_fraction: float

    @property
    def speculative(self) -> bool:
        """Whether updates are done before it is known whether the gradient is clipped, and again if it is."""
        return self.clip_by is ClipBy.SPECULATION

    def deferred(self, shape: ModelLayout) -> frozenset[int]:
        """Return the records whose updates wait for the next forward pass: all, if clipping defers updates."""
        return interleaved(shape, 1.0 if self.clip_by is ClipBy.DEFERRAL else self.deferred_fraction)

    def held(self, shape: ModelLayout) -> frozenset[int]:
        """Return the records whose gradients stay until the step has ended."""
        return frozenset(shape.trainable) if self.speculative else self.deferred(shape)
