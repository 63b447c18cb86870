"""Which layers of a configuration stay in its miniature: of each kind the first and the last, in their order."""

import re
from collections.abc import Callable
from itertools import pairwise
from typing import Any

from common.models.miniature.field_names import DEPTH, FROM_BACK, FROM_FRONT, PERIOD

LEAST_LAYERS = 3
_MOST_KINDS = 6

_Shrink = Callable[[str, Any], Any]


class KeptLayers:
    """The layers of a configuration that stay.

    Args:
        fields: the configuration's, as ``to_dict`` gives them.
        config: the configuration, for a number of layers under another name; None for a plain dictionary.

    Attributes:
        depth: number of layers that there are; 0 if the fields say nothing of it.
        indices: the layers that stay, sorted.
    """

    def __init__(self, fields: dict[str, Any], config: Any) -> None:
        depths = [value for name, value in fields.items() if DEPTH.match(name) and isinstance(value, int)]
        depth = getattr(config, "num_hidden_layers", None) if config is not None else None
        self.depth = depth if isinstance(depth, int) else max(depths, default=0)
        if not self.depth:
            self.depth = len(fields.get("layer_types") or ())
        kinds: list[tuple[Any, ...]] = [() for _ in range(self.depth)]
        least = min(self.depth, LEAST_LAYERS)
        for name, value in fields.items():
            kinds_by_field = self._kinds(name, value)
            if kinds_by_field is not None:
                kinds = [(*kind, extra) for kind, extra in zip(kinds, kinds_by_field, strict=True)]
            least = max(least, self._least_layers(name, value))
        chosen: set[int] = set()
        distinct = list(dict.fromkeys(kinds))
        if len(distinct) > _MOST_KINDS:  # sizes that differ from layer to layer
            distinct = [distinct[round(at * (len(distinct) - 1) / (_MOST_KINDS - 1))] for at in range(_MOST_KINDS)]
        for kind in distinct:
            places = [index for index, other in enumerate(kinds) if other == kind]
            chosen |= {places[0], places[-1]}
        for index in range(self.depth):
            if len(chosen) >= least:
                break
            chosen.add(index)
        self.indices = sorted(chosen)

    def _kinds(self, name: str, value: Any) -> list[Any] | None:
        """Return what the field ``name`` says of each layer; None if it says nothing of layers."""
        depth = self.depth
        if isinstance(value, bool) or not depth:
            return None
        if isinstance(value, int) and 0 < value < depth:
            if FROM_FRONT.search(name):
                return [index < value for index in range(depth)]
            if FROM_BACK.search(name):
                return [index >= depth - value for index in range(depth)]
        if _is_index_list(name, value, depth):
            return [index in value for index in range(depth)]
        if isinstance(value, list | tuple) and len(value) == depth and depth > 2:
            return [str(one) for one in value]
        if _is_by_layer(value):
            return [str(value.get(f"{index:02}", value.get(str(index)))) for index in range(depth)]
        return None

    def _least_layers(self, name: str, value: Any) -> int:
        """Return how many layers it takes to see the pattern ``name`` once and its beginning again."""
        if isinstance(value, list | tuple) and "types" in name and 1 < len(value) < self.depth:
            return len(value) + 1
        if isinstance(value, int) and PERIOD.search(name) and value > 1 and self.depth > 2:
            return min(self.depth, min(value, 3) + 1)
        return 0

    def select(self, name: str, value: Any, shrink_number: _Shrink, shrink_field: _Shrink) -> Any:
        """Return a field's ``value`` for the layers that stay; None if it says nothing of single layers.

        Args:
            shrink_number: returns what becomes of a layer's entry in a list, given the field's name and the entry.
            shrink_field: returns what becomes of a field that differs in a layer, given its name and value.
        """
        depth, layers = self.depth, self.indices
        if not depth or isinstance(value, bool):
            return None
        if isinstance(value, int):
            if FROM_FRONT.search(name):
                return len(layers) if value >= depth else sum(index < value for index in layers)
            if FROM_BACK.search(name):
                return sum(index >= depth - value for index in layers)
            if name.endswith("layer_end_index"):
                return len(layers) - 1
            return None
        if _is_index_list(name, value, depth):
            return [place for place, index in enumerate(layers) if index in value]
        if isinstance(value, list | tuple) and len(value) == depth and depth > 2:
            return [shrink_number(name, value[index]) for index in layers]
        if _is_by_layer(value):
            found = {}
            for place, index in enumerate(layers):
                one = value.get(f"{index:02}", value.get(str(index)))
                if one is not None:
                    found[f"{place:02}"] = {key: shrink_field(key, entry) for key, entry in one.items()}
            return found
        return None


def _is_index_list(name: str, value: Any, depth: int) -> bool:
    if not isinstance(value, list) or not value or not re.search(r"layer|idx|ind(ex|ic)es", name):
        return False
    if not all(type(one) is int and 0 <= one < depth for one in value):
        return False
    return all(first < second for first, second in pairwise(value))


def _is_by_layer(value: Any) -> bool:
    return isinstance(value, dict) and bool(value) and all(isinstance(key, str) and key.isdigit() for key in value)
