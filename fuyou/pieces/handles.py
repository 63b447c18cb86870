"""The parameters of a block in pieces: handles to bind to the model, real ones to fetch, gradients to hand on."""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch

from common.models.structure import parameter_names
from fuyou.layout.record_parts import Piece, PiecePart
from fuyou.model.streamed_model import StreamedModel
from fuyou.pieces.experts import own_computations
from fuyou.pieces.handle import Handle, Origin, hand_on
from fuyou.pieces.run import Use, Weights, current_supply


class PieceHandles:
    """The parameters of a block that are in pieces, as handles.

    Args:
        trained: first names of the parameters whose gradients are wanted.
        on_gradient: called with a part and its gradient, in the dtype of the weights, as soon as autograd has it. It
            must copy what it wants to keep, and may be called for several micro-batches in turn.
        device: where handles pretend to be; None: where ``stack`` computes.

    Raises:
        UserError: if the block cannot be cut in these pieces.
    """

    def __init__(
        self,
        stack: StreamedModel,
        layer: int,
        pieces: Sequence[Piece],
        trained: Collection[str],
        on_gradient: Callable[[PiecePart, torch.Tensor], None],
        device: torch.device | None = None,
    ):
        self.parameters: dict[str, torch.Tensor] = {}
        """Handles by all names of the parameters."""
        self._stack, self._device = stack, device or stack.device
        self._trained, self._on_gradient = frozenset(trained), on_gradient
        self._piece_of = {part: index for index, piece in enumerate(pieces) for part in piece}
        parts: dict[str, list[PiecePart]] = {}
        for part in self._piece_of:
            parts.setdefault(part.name, []).append(part)
        aliases = {names[0]: names for names in parameter_names(stack.model)}
        for name, ranges in parts.items():
            ranges.sort(key=lambda part: part.experts or (0, 0))
            self.parameters.update(dict.fromkeys(aliases[name], self._leaf(name, tuple(ranges))))
        self._computations = own_computations(stack, layer, self, parts, self._trained)

    def _leaf(self, name: str, parts: tuple[PiecePart, ...]) -> Handle:
        meta = self._stack.model.get_parameter(name)
        geometry = torch.empty(meta.shape, dtype=self._stack.dtype_of(name), device="meta")
        leaf = Handle.make(geometry, Origin(self, name, parts), self._device)
        if name in self._trained:
            leaf.requires_grad_()
            if parts[0].experts is None:
                hand_on(leaf, lambda gradient: self.take_gradient(parts[0], gradient))
        return leaf

    def fetch(self, parts: Collection[PiecePart], use: Use | None = None) -> Weights:
        """Return the parameters of these parts: :meth:`fuyou.pieces.handle.Parts.fetch`."""
        if use is None:
            use = Use.FORWARD if torch._C._current_graph_task_id() == -1 else Use.BACKWARD
        return current_supply().need(frozenset(self._piece_of[part] for part in parts), use)

    def take_gradient(self, part: PiecePart, gradient: torch.Tensor) -> None:
        """Hand on the gradient of ``part``: :meth:`fuyou.pieces.handle.Parts.take_gradient`."""
        weights = self.fetch((part,), Use.GRADIENT)
        self._on_gradient(part, gradient.to(weights[part].dtype))

    @contextmanager
    def bound(self) -> Iterator[None]:
        """Let the block use the handles while the context is open.

        It must be open around all passes that use them, from before the first begins until the last has ended.
        """
        with ExitStack() as opened:
            opened.enter_context(self._stack.bound(self.parameters))
            for computation in self._computations:
                opened.enter_context(computation.bound())
            yield
