"""The parameters of a block in pieces, as handles to bind to the model, and its mixtures' experts range by range."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any

import torch

from common.errors import UserError
from common.models.structure import parameter_names
from fuyou.layout.record_parts import Piece, PiecePart
from fuyou.model.expert_modules import expert_modules
from fuyou.model.streamed_model import StreamedModel
from fuyou.pieces.expert_adapters import ExpertAdapters, adapted_forward, adapted_modules
from fuyou.pieces.grouped_experts import GroupedExperts
from fuyou.pieces.handle import Handle, Origin, PieceSource, hand_on
from fuyou.pieces.meta_block import output_is_saved


def expert_parameters(stack: StreamedModel, layer: int, names: Collection[str]) -> list[tuple[tuple[str, ...], int]]:
    """Return, for each mixture of a block, the parameters with one matrix per expert, and the number of experts.

    Args:
        names: first names of the parameters that are to be cut.

    Raises:
        UserError: if some of them are in another record, which is not cut.
    """
    mixtures = []
    for prefix, module in expert_modules(stack, layer):
        experts = int(module.num_experts)  # type: ignore[arg-type]
        members = {
            f"{prefix}.{name}"
            for name, value in module._parameters.items()
            if value is not None and value.dim() > 1 and value.shape[0] == experts
        }
        if members - set(names):
            raise UserError(
                f"The experts of {prefix} are trained next to frozen parameters of their block, in a separate "
                "record that cannot be cut in pieces: train all of the block or adapters (--lora-rank), "
                "or give more --device-memory, so that a whole block fits."
            )
        if members:
            mixtures.append((tuple(name for name in names if name in members), experts))
    return mixtures


def _computations(
    stack: StreamedModel,
    layer: int,
    source: PieceSource,
    parts: Mapping[str, Sequence[PiecePart]],
    trained: Collection[str],
) -> list[Callable[[], AbstractContextManager[None]]]:
    """Return what lets modules of a block compute otherwise: experts in ranges, and adapters of whole parameters."""
    adapters = {prefix: ExpertAdapters.around(stack.model, prefix) for prefix, _ in expert_modules(stack, layer)}
    others = adapted_modules(
        stack.blocks[layer], {wrapper for around in adapters.values() for wrapper in around.wrappers.values()}
    )
    computations: list[Callable[[], AbstractContextManager[None]]] = [partial(adapted_forward, each) for each in others]
    for prefix, module in expert_modules(stack, layer):
        names = [f"{prefix}.{name}" for name in module._parameters]
        cut = {name: parts[name] for name in names if name in parts and parts[name][0].experts is not None}
        if not cut:
            continue
        _check_experts(prefix, module)
        saved = output_is_saved(stack, layer, prefix)
        computations.append(GroupedExperts(module, source, cut, trained, adapters[prefix], skips=not saved).bound)
    return computations


def _check_experts(prefix: str, module: Any) -> None:
    norm = getattr(module, "post_expert_norm", None)
    if getattr(module, "has_post_expert_norm", False) and (norm is None or any(True for _ in norm.parameters())):
        raise UserError(
            f"The experts of {prefix} are followed by a norm with parameters inside their module, whose gradient would "
            "be lost: they cannot be cut in pieces."
        )
    chosen = module.config._experts_implementation or "eager"
    if chosen != "grouped_mm":
        raise UserError(
            f"The experts of {prefix} use transformers' implementation {chosen!r}, which cannot be cut in pieces: use "
            "grouped_mm."
        )


class PieceHandles:
    """The parameters of a block that are in pieces, as handles.

    Args:
        trained: first names of the parameters whose gradients are wanted.
        on_gradient: called with a part and its gradient, as :class:`PieceSource` calls it.
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
        self.parameters: dict[str, torch.Tensor] = {}  # Handles by all names of the parameters
        self._stack, self._device = stack, device or stack.device
        self._trained = frozenset(trained)
        self.source = PieceSource(pieces, on_gradient)
        parts: dict[str, list[PiecePart]] = {}
        for part in self.source.piece_of:
            parts.setdefault(part.name, []).append(part)
        aliases = {names[0]: names for names in parameter_names(stack.model)}
        for name, ranges in parts.items():
            ranges.sort(key=lambda part: part.experts or (0, 0))
            self.parameters.update(dict.fromkeys(aliases[name], self._leaf(name, tuple(ranges))))
        self._computations = _computations(stack, layer, self.source, parts, self._trained)

    def _leaf(self, name: str, parts: tuple[PiecePart, ...]) -> Handle:
        meta = self._stack.model.get_parameter(name)
        geometry = torch.empty(meta.shape, dtype=self._stack.dtype_of(name), device="meta")
        leaf = Handle.make(geometry, Origin(self.source, name, parts), self._device)
        if name in self._trained:
            leaf.requires_grad_()
            if parts[0].experts is None:
                hand_on(leaf, lambda gradient: self.source.take_gradient(parts[0], gradient))
        return leaf

    @contextmanager
    def bound(self) -> Iterator[None]:
        """Let the block use the handles while the context is open.

        It must be open around all passes that use them, from before the first begins until the last has ended.
        """
        with ExitStack() as opened:
            opened.enter_context(self._stack.bound(self.parameters))
            for computation in self._computations:
                opened.enter_context(computation())
            yield
