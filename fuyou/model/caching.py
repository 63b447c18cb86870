"""Which keys and values the blocks of a model keep when it generates, found by a run without weights.

Generation gives the model a cache of transformers' own; whatever the model's code does with it, it does. But blocks
run one at a time here, and what they keep must have been counted before: so each block has to keep the keys and values
of its own layer, and nothing else. That is tried out with all blocks on the meta device, and a small model of the same
family has to compute with such a cache what it computes without one.
"""

from typing import Any, NoReturn

import torch
from torch import nn
from torch.utils._pytree import tree_map
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from common.errors import UserError
from fuyou.layout.key_values import LayerKeyValues
from fuyou.model.blocks.weightless import on_meta
from fuyou.model.family import small_model
from fuyou.model.streamed_model import StreamedModel

_TOKENS, _PADDED, _NEW = 7, 3, 3
"""Tokens of a prompt of the small model, how many of them are padding in one of its rows, and tokens after it."""


class _Kept(Exception):
    """Ends a block's run as soon as it hands over what it keeps."""

    def __init__(self, layer: "_Listener", keys: torch.Tensor, values: torch.Tensor):
        super().__init__()
        self.layer, self.keys, self.values = layer, keys, values


class _Listener(DynamicLayer):
    """The place of a layer in a cache, which takes nothing."""

    def __init__(self, sliding: bool):
        super().__init__()
        self.is_sliding = sliding

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any) -> NoReturn:
        raise _Kept(self, key_states, value_states)


def find_key_values(stack: StreamedModel) -> tuple[LayerKeyValues, ...]:
    """Return what each block keeps.

    Raises:
        UserError: a block keeps something else, or the model does not compute with it what it computes without.
    """
    name = type(stack.model).__name__
    try:
        found = _layers(stack)
        why = _difference(type(stack.model), stack.model.config)
    except UserError as error:
        raise _refusal(name, str(error).rstrip(".")) from error
    except Exception as error:  # what a family's own code does with a cache that it did not make
        raise _refusal(name, f"{type(error).__name__}: {error}") from error
    if why is not None:
        raise _refusal(name, why)
    return found


def _refusal(name: str, why: str) -> UserError:
    return UserError(
        f"{name} cannot keep keys and values from token to token when its blocks run one at a time ({why}): generate "
        "with use_cache=False, which computes whole sequences again for each token."
    )


def _layers(stack: StreamedModel) -> tuple[LayerKeyValues, ...]:
    if stack.links:
        raise UserError("its blocks hand each other more than hidden states")
    cache = DynamicCache(config=stack.model.config)
    kinds = [type(layer) for layer in cache.layers]
    other = next((kind for kind in kinds if kind not in (DynamicLayer, DynamicSlidingWindowLayer)), None)
    if other is not None or len(kinds) != len(stack.blocks):
        of = f"{len(kinds)} layers" if other is None else f"a {other.__name__}"
        raise UserError(f"its cache has {of} for {len(stack.blocks)} blocks")
    windows = [getattr(layer, "sliding_window", None) for layer in cache.layers]
    listeners = [_Listener(window is not None) for window in windows]
    cache.layers = list(listeners)
    hidden, calls = stack.embed_without_weights(torch.zeros(1, 2, dtype=torch.long, device=stack.device), cache)

    def to_meta(leaf: Any) -> Any:
        return leaf.to("meta") if isinstance(leaf, torch.Tensor) else leaf

    found = []
    for index, block in enumerate(stack.blocks):
        kept = _kept_by(block, hidden.to("meta"), *tree_map(to_meta, calls.arguments[index]))
        if kept is None or kept.layer is not listeners[index]:
            raise UserError(f"block {index} does not keep keys and values of its own")
        if any(part.dim() != 4 or part.shape[::2] != (1, 2) for part in (kept.keys, kept.values)):
            raise UserError(f"block {index} keeps {list(kept.keys.shape)} of two tokens")
        (heads, width), (value_heads, value_width) = kept.keys.shape[1::2], kept.values.shape[1::2]
        if {kept.keys.dtype, kept.values.dtype} != {stack.model.dtype}:
            raise UserError(f"block {index} keeps {kept.keys.dtype} where it computes in {stack.model.dtype}")
        found.append(LayerKeyValues((heads, width), (value_heads, value_width), windows[index]))
    return tuple(found)


def _kept_by(block: nn.Module, hidden: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Kept | None:
    try:
        with on_meta(block), torch.no_grad():
            block(hidden, *args, **kwargs)
    except _Kept as kept:
        return kept
    return None


def _difference(kind: type[PreTrainedModel], config: Any) -> str | None:
    """Return how a small model of the family computes otherwise with a cache than without; None if it does not."""
    try:
        small = small_model(kind, config).eval()
    except Exception:  # each family checks its own fields in its own way
        return "no small model of its kind can be made, to see whether it computes the same"
    parameters = dict(small.named_parameters(remove_duplicate=False))
    for name, parameter in parameters.items():
        module, _, attribute = name.rpartition(".")
        small.get_submodule(module)._parameters[attribute] = nn.Parameter(
            parameter.detach().to("meta"), requires_grad=False
        )
    stack = StreamedModel(small, torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 13, (2, _TOKENS + _NEW), generator=generator)
    mask = torch.ones_like(ids)
    mask[1, :_PADDED] = 0
    with torch.no_grad(), stack.bound({name: value.detach() for name, value in parameters.items()}):
        cache = DynamicCache(config=small.config)
        steps = [slice(0, _TOKENS), *(slice(token, token + 1) for token in range(_TOKENS, _TOKENS + _NEW))]
        parts = [_last_hidden(stack, ids, mask, part, cache) for part in steps]
        dim = stack.token_dim
        with_cache = torch.cat([part.narrow(dim, part.shape[dim] - 1, 1) for part in parts[1:]], dim)
        without = _last_hidden(stack, ids, mask, slice(0, _TOKENS + _NEW), None).narrow(dim, _TOKENS, _NEW)
    apart = float((with_cache - without).abs().max() / without.abs().max())
    return None if apart < 1e-4 else f"hidden states of a small model of its kind are {apart:.1%} apart then"


def _last_hidden(
    stack: StreamedModel, ids: torch.Tensor, mask: torch.Tensor, part: slice, cache: DynamicCache | None
) -> torch.Tensor:
    """Return the last block's output for a range of tokens after those that the cache has."""
    hidden, calls = stack.embed(generation_inputs(ids, mask, part), cache)
    for index in range(len(stack.blocks)):
        hidden = stack.block(index, hidden, calls)
    return hidden


def generation_inputs(ids: torch.Tensor, mask: torch.Tensor, part: slice) -> dict[str, torch.Tensor]:
    """Return what a model is called with for a range of tokens, the mask of all up to them included.

    Args:
        ids: int64 ``[B, S]``, padded on the left.
        mask: int64 ``[B, S]``, 0 where there is padding. Positions count from the first token that is none.
        part: the range.
    """
    positions = (mask.cumsum(1) - 1).masked_fill(mask == 0, 0)
    return {
        "input_ids": ids[:, part],
        "attention_mask": mask[:, : part.stop],
        "position_ids": positions[:, part],
    }
