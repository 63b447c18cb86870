"""Shrink a configuration by rule to a tiny one of the same family.

Structure stays: kinds of layers and their order, grouped and shared keys and values, windows, experts and their groups,
tying, norms, caps, rotary types. Sizes shrink by what their names say that they count:

* layers: two of each kind that the per-layer lists and the positions distinguish, in order;
* heads and experts: a few, in the same ratios; heads are small, and widths follow from them;
* windows, chunks, and numbers of selected tokens: small enough to matter in a row of :data:`TOKENS` tokens;
* vocabularies: :data:`VOCABULARY` tokens, including special tokens.

Other large numbers are widths; other small numbers stay.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
from transformers import PreTrainedConfig

from common.errors import UserError

DEPTH = re.compile(
    r"^(num_hidden_layers|n_layers?|num_layers|num_blocks|depth|(num_)?(de|en)coder_layers|num_layers_per_stack"
    r"|conf_num_hidden_layers|num_global_layers)$"
)
WIDTHS = ("hidden_size", "d_model", "n_embd", "emb_dim", "embedding_dim", "dim_model", "hidden_dim")
HEAD_COUNTS = (
    "num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads",
    "num_decoder_attention_heads", "attention_heads",
)  # fmt: skip
HEAD_COUNT = re.compile(r"(^|_)heads$|_heads_|^n_heads?$|^n_head$|query_groups$")
INDEX_HEADS = re.compile(r"^index_n_heads$")
HEAD_DIM_NAME = re.compile(
    r"head_?dim$|head_size$|^d_head$|^d_kv$|^dim_head$|kv_channels$|d_head$|^rotary_dim$"
)
VOCABULARY_SIZE = re.compile(r"vocab_size|^vocab_offset$")
TOKEN_ID = re.compile(r"_(id|ids|idx|index)$")
NOT_A_COUNT = re.compile(r"size|dim|period|offset|interval|layer|group|per_tok")
CHOSEN = re.compile(r"(experts_per_tok(en)?|topk|top_k|moe_k|top_k_experts)$")
GROUPS = re.compile(r"(^|_)n_?groups?$|expert_group$|^o_groups$|^mamba_ngroups$")
TOKEN_COUNT = re.compile(
    r"window(?!_layers|_pattern)|chunk|local_attention|local_attn|block_size|rel_extent|index_topk|index_block|floor_scale"
    r"|n_floor|local_blocks"
)
POSITIONS = re.compile(
    r"position|max_seq|context_length|n_ctx|max_length|max_(source|target)|seq_length|max_distance"
)
FROM_FRONT = re.compile(r"^first_k_|num_dense_layers|max_window_layers|layer_start_index|num_hash_layers")
FROM_BACK = re.compile(r"kv_shared_layers$")
PERIOD = re.compile(
    r"period$|interval$|every_n_layers$|layer_group_size$|sparse_step$|sliding_window_pattern$|_pattern$"
)
OFFSET = re.compile(r"layer_offset$")
TOWER = re.compile("vision|audio|siglip|vit|clip|encodec|t5")
ROTARY = (
    "rope_parameters",
    "rope_theta",
    "rope_scaling",
    "rotary_dim",
    "rotary_pct",
    "partial_rotary_factor",
)
PIXELS = re.compile(r"kernel|sampl|num_mel|stride|tile|crop|bins|buckets|buffer|codebook")
STATE = re.compile(r"d_state$|state_size$|_rank$|lora_rank|dt_rank")
# The last: beyond it, xLSTM evaluates chunk by chunk, and calls its blocks many times, which are not trained like that.
NOT_SIZES = re.compile(
    r"^(id2label|label2id|transformers_version|architectures|seed|pretraining_tp|max_inference_chunksize)$"
)


LEAST_LAYERS = 3
_MOST_KINDS = 6

_Shrink = Callable[[str, Any], Any]


class KeptLayers:
    """The layers of a configuration that remain; ``indices``, sorted, of ``depth`` layers, 0 if that is unknown."""

    def __init__(self, fields: dict[str, Any], config: Any) -> None:
        depths = [value for name, value in fields.items() if DEPTH.match(name) and isinstance(value, int)]
        depth = getattr(config, "num_hidden_layers", None) if config is not None else None
        self.depth = depth if isinstance(depth, int) else max(depths, default=0)
        if not self.depth:
            self.depth = len(fields.get("layer_types") or ())
        kinds: list[tuple[Any, ...]] = [() for _ in range(self.depth)]
        least = min(self.depth, LEAST_LAYERS)
        for name, value in fields.items():
            items = self._by_layer(name, value)
            if items is not None:
                kinds = [(*kind, str(item)) for kind, item in zip(kinds, items, strict=True)]
            least = max(least, self._least_layers(name, value))
        chosen: set[int] = set()
        distinct = list(dict.fromkeys(kinds))
        if len(distinct) > _MOST_KINDS:  # sizes that differ from layer to layer
            distinct = [
                distinct[round(at * (len(distinct) - 1) / (_MOST_KINDS - 1))] for at in range(_MOST_KINDS)
            ]
        for kind in distinct:
            positions = [index for index, other in enumerate(kinds) if other == kind]
            chosen |= {positions[0], positions[-1]}
        others = [index for index in range(self.depth) if index not in chosen]
        self.indices = sorted([*chosen, *others[: max(0, least - len(chosen))]])

    def _by_layer(self, name: str, value: Any) -> list[Any] | None:
        """Return what a field says about each layer; None if it is not about single layers."""
        depth = self.depth
        layers = range(self.depth)
        if isinstance(value, bool) or not depth:
            return None
        if isinstance(value, int):
            if FROM_FRONT.search(name):
                return [index < value for index in layers]
            return [index >= depth - value for index in layers] if FROM_BACK.search(name) else None
        if _is_index_list(name, value, depth):
            return [index in value for index in layers]
        if isinstance(value, list | tuple) and len(value) == depth and depth > 2:
            return list(value)
        if isinstance(value, dict) and value and all(isinstance(key, str) and key.isdigit() for key in value):
            return [value.get(f"{index:02}", value.get(str(index))) for index in layers]
        return None

    def _least_layers(self, name: str, value: Any) -> int:
        """Return how many layers show the pattern ``name`` once and its beginning again."""
        if isinstance(value, list | tuple) and "types" in name and 1 < len(value) < self.depth:
            return len(value) + 1
        if isinstance(value, int) and PERIOD.search(name) and value > 1 and self.depth > 2:
            return min(self.depth, min(value, 3) + 1)
        return 0

    def select(self, name: str, value: Any, shrink_number: _Shrink, shrink_field: _Shrink) -> Any:
        """Return a field's ``value`` for the remaining layers, shrunk; None if it is not about single layers."""
        items = self._by_layer(name, value)
        if items is None:
            is_last = self.depth and type(value) is int and name.endswith("layer_end_index")
            return len(self.indices) - 1 if is_last else None
        chosen = [items[index] for index in self.indices]
        if isinstance(value, int):
            return sum(chosen)
        if _is_index_list(name, value, self.depth):
            return [position for position, is_listed in enumerate(chosen) if is_listed]
        if isinstance(value, dict):
            return {
                f"{position:02}": {key: shrink_field(key, entry) for key, entry in item.items()}
                for position, item in enumerate(chosen)
                if item is not None
            }
        return [shrink_number(name, item) for item in chosen]


def _is_index_list(name: str, value: Any, depth: int) -> bool:
    if not isinstance(value, list) or not value or not re.search(r"layer|idx|ind(ex|ic)es", name):
        return False
    in_range = all(type(item) is int and 0 <= item < depth for item in value)
    return in_range and all(first < second for first, second in pairwise(value))


TOKENS = 24  # Length of a row in which every window of a miniature hides something
VOCABULARY = 160
_WINDOW = 6
_HEADS = 4
_HEAD_DIM = 16
_LEAST_ROTATED = 8
_PLACES = 64
_EXPERTS = 4

# Fields that no rule can know, by model type.
_EXCEPTIONS: dict[str, dict[str, Any]] = {
    "reformer": {"axial_pos_shape": [4, TOKENS // 4]}  # its product is the only length that trains
}


@contextmanager
def on_one_thread() -> Iterator[None]:
    """Compute small models with a single thread. The operations are too short for several: where other processes use
    the processors, threads that wait for each other took 70 times as much processor time."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def miniature(config: PreTrainedConfig) -> PreTrainedConfig:
    """Return a configuration of the same class and structure with some hundred thousand parameters, or refuse."""
    fields = _Shrunk(config.to_dict(), config).result
    if fields.get("qk_head_dim"):  # a sum that some configurations also store
        fields["qk_head_dim"] = fields["qk_nope_head_dim"] + fields["qk_rope_head_dim"]
    fields.update(_EXCEPTIONS.get(config.model_type, {}))
    for name in ("transformers_version", "_name_or_path", "quantization_config"):
        fields.pop(name, None)
    try:
        small = type(config).from_dict(fields)
    except Exception as error:  # each family checks its own fields in its own way
        raise UserError(
            f"A small {config.model_type!r} model cannot be configured ({type(error).__name__}: {error})."
        ) from error
    small.dtype = config.dtype
    return small


class _Shrunk:
    """The shrunk fields of a (sub-)configuration inside ``outer``; of a plain dictionary, ``config`` is None."""

    def __init__(self, fields: dict[str, Any], config: Any = None, outer: "_Shrunk | None" = None):
        self._fields = fields
        self._config = config
        self._outer = outer
        self.small_width = self.small_heads = self.small_head_dim = 0
        self._measure()
        self._kept = KeptLayers(fields, config)
        self.result = {name: self._shrink(name, value) for name, value in fields.items()}

    def _first(self, names: Sequence[str]) -> int | None:
        values = [self._fields.get(name) for name in names]
        return next((value for value in values if type(value) is int and value > 0), None)

    def _measure(self) -> None:
        outer = self._outer
        self.width, self.heads = self._first(WIDTHS), self._first(HEAD_COUNTS)
        if self.width is None:
            other = outer  # of a mere group of fields, like DBRX's ffn_config
            if outer is None and isinstance(self._config, PreTrainedConfig):
                text = self._config.get_text_config(decoder=True)  # of several parts, it has the last word
                other = None if text is self._config else _Shrunk(text.to_dict(), text)
            if other is not None:
                for name in (
                    "width",
                    "heads",
                    "head_dim",
                    "most_heads",
                    "small_width",
                    "small_heads",
                    "small_head_dim",
                ):
                    setattr(self, name, getattr(other, name))
                return
        width = self.width or 1024
        heads = self.heads or 8
        explicit = self._first(
            ("head_dim", "attention_head_dim", "d_head", "dim_head", "attention_head_size", "d_kv")
        )
        self.head_dim = explicit or max(1, width // heads)
        # A tower is smaller than the language model that it belongs to, as it is when both are large.
        tower = outer is not None and bool(TOWER.search(str(self._fields.get("model_type"))))
        self.most_heads = _HEADS // 2 if tower else _HEADS
        self.small_heads = min(heads, self.most_heads)
        rotary = min([1.0, *_fractions(self._fields)])
        small = _HEAD_DIM // 2 if tower else _HEAD_DIM
        if outer is not None and not tower:  # parts whose widths go together keep their ratios
            small = max(
                _HEAD_DIM // 2, min(2 * _HEAD_DIM, self.head_dim * outer.small_head_dim // outer.head_dim)
            )
        while small * rotary < _LEAST_ROTATED and small < self.head_dim:
            small *= 2
        self.small_head_dim = min(self.head_dim, small)
        product = self.small_heads * self.small_head_dim
        if self.heads is None:
            self.small_width = min(width, _HEADS * _HEAD_DIM)
        elif heads * self.head_dim == width:
            self.small_width = product
        else:
            self.small_width = min(
                width,
                max(
                    8 * self.small_heads, min(128, _to_multiple(width * product / (heads * self.head_dim), 8))
                ),
            )

    def _narrow(self, value: int) -> int:
        if self._outer is not None and self._outer.width == value != self.width:
            return self._outer.small_width
        width = self.width or 1024
        if self.heads and value == self.heads * self.head_dim:
            return self.small_heads * self.small_head_dim
        if value % width == 0:
            return value // width * self.small_width
        return min(value, max(8, _to_multiple(value * self.small_width / width, 8)))

    def _thin(self, value: int) -> int:
        if value == self.head_dim:
            return self.small_head_dim
        small = value * self.small_head_dim / self.head_dim
        return min(value, max(4, _to_multiple(small, 4)), 2 * self.small_head_dim)

    def _few_heads(self, name: str, value: int) -> int:
        size = None if value == self.heads else self._size_of_heads(name)
        width = self.width or 1024
        widths = {other for other in self._fields.values() if type(other) is int}
        if size is not None and (value * size % width == 0 or value * size in widths):  # as Mamba's inner one
            inner = self._narrow(value * size)
            if inner % self._thin(size) == 0:
                return inner // self._thin(size)
        heads = self.heads or value
        return max(min(value, 2), round(value * min(heads, self.most_heads) / heads))

    def _size_of_heads(self, name: str) -> int | None:
        stem = name.removeprefix("num_").removesuffix("s")
        names = [
            f"{stem.removesuffix('_head')}_head_dim",
            name.replace("num_", "").replace("heads", "head_dim"),
        ]
        names += [name.replace("n_heads", "d_head"), name.replace("num_heads", "head_dim")]
        names += ["mamba_headdim"] if "mamba" in name else []
        sizes = [int(self._fields[other]) for other in names if isinstance(self._fields.get(other), int)]
        return sizes[0] if sizes else self.head_dim if name == "num_heads" else None

    def _shrink(self, name: str, value: Any) -> Any:
        if NOT_SIZES.match(name):
            return value
        by_layer = self._kept.select(name, value, self._shrink_one, self._shrink)
        if by_layer is not None:
            return by_layer
        if isinstance(value, dict):
            return self._shrink_group(name, value)
        if isinstance(value, list) and value and all(type(item) in (int, float) for item in value):
            return self._shrink_list(name, value)
        return self._shrink_one(name, value)

    def _shrink_group(self, name: str, value: dict[str, Any]) -> dict[str, Any]:
        if name.startswith("rope"):
            return {key: self._shrink_rotary(key, item) for key, item in value.items()}
        if name.endswith("rates"):
            return {
                key: min(item, 4 if item > 4 else 2) if type(item) is int else item
                for key, item in value.items()
            }
        nested = getattr(self._config, name, None)
        return _Shrunk(value, nested if isinstance(nested, PreTrainedConfig) else None, self).result

    def _shrink_rotary(self, name: str, value: Any) -> Any:
        if isinstance(value, dict):
            return self._shrink_group(f"rope_{name}", value)
        return self._shrink_list(name, value) if isinstance(value, list) else value

    def _shrink_list(self, name: str, value: list[Any]) -> list[Any]:
        """Shrink a list along the dimensions of a head (rotary factors and sections); keep others."""
        half = self.head_dim // 2
        if name.endswith(("_factor", "factors")) and len(value) > 4:
            count = max(1, round(len(value) * self.small_head_dim / self.head_dim))
            return [value[index * len(value) // count] for index in range(count)]
        if "section" in name and sum(value) <= half and sum(value):
            return _split(max(len(value), sum(value) * self.small_head_dim // self.head_dim), value)
        if sum(value) == self.width:  # what a width is put together from
            return _split(self.small_width, value)
        if TOKEN_ID.search(name):
            return [self._token(name, item) for item in value]
        return value

    def _shrink_one(self, name: str, value: Any) -> Any:
        if not isinstance(value, int) or isinstance(value, bool) or value <= 1:
            return value
        if name in WIDTHS:
            return self._narrow(value)
        shrinks = (shrink for rule, shrink in self._rules() if rule.search(name))
        return next(shrinks, lambda _, value: self._narrow(value) if value > 24 else value)(name, value)

    def _rules(self) -> list[tuple[re.Pattern[str], Callable[[str, int], int]]]:
        """Return rules: the first pattern that matches a name decides how its number shrinks."""

        def keep(_: str, value: int) -> int:
            return value

        def at_most(most: int) -> Callable[[str, int], int]:
            return lambda _, value: min(value, most)

        grouped = any((self._fields.get(name) or 1) > 1 for name in ("n_group", "num_expert_group"))
        experts = 2 * _EXPERTS if grouped else _EXPERTS
        depth, remaining = self._kept.depth, len(self._kept.indices)
        return [
            (DEPTH, lambda _, value: remaining if value == depth else min(value, LEAST_LAYERS)),
            (VOCABULARY_SIZE, at_most(VOCABULARY)),
            (TOKEN_COUNT, at_most(_WINDOW)),
            (re.compile(r"^num_position_embeddings$"), at_most(16)),  # a square
            (POSITIONS, keep if any(name in self._fields for name in ROTARY) else at_most(_PLACES)),
            (re.compile(r"^(spatial_|temporal_)?patch_size$"), at_most(4)),
            (re.compile(r"image_size"), at_most(16)),
            (re.compile(r"^base_channels$"), at_most(32)),  # the usual number of groups that are normalised
            (TOKEN_ID, self._token),
            (PERIOD, at_most(3)),
            (OFFSET, at_most(1)),
            (re.compile("topk_group"), lambda _, value: 1),
            (CHOSEN, at_most(2)),
            (GROUPS, at_most(2)),
            (re.compile(r"shared_experts$"), at_most(2)),
            (re.compile(r"zero_expert"), at_most(2)),
            (STATE, lambda _, value: min(value, 24 if value > 512 or value <= 24 else 16)),
            # Of few heads, all scores are often 0 together, and which tokens of a tie are chosen is arbitrary.
            (
                INDEX_HEADS,
                lambda name, value: min(value, 16) if value >= 16 else self._few_heads(name, value),
            ),
            (HEAD_COUNT, self._few_heads),
            (HEAD_DIM_NAME, lambda _, value: self._thin(value)),
            (re.compile(rf"^(?!.*({NOT_A_COUNT.pattern})).*expert"), at_most(experts)),
            (PIXELS, keep),
        ]

    def _token(self, _: str, value: int) -> int:
        """Return a small token for ``value``: special tokens stay distinct and in the vocabulary."""
        whole = self
        while whole._outer is not None:
            whole = whole._outer
        known = whole.__dict__.setdefault("tokens", {})
        if value < VOCABULARY // 4:
            return value
        return int(known.setdefault(value, VOCABULARY - 1 - len(known)))


def _fractions(fields: dict[str, Any]) -> list[float]:
    fractions = []
    for name, value in fields.items():
        if isinstance(value, dict):
            fractions += _fractions(value) if name.startswith("rope") or name.endswith("attention") else []
        elif name in ("partial_rotary_factor", "rotary_pct", "rotary_emb_fraction") and isinstance(
            value, float | int
        ):
            fractions.append(float(value))
        elif name == "mrope_section" and isinstance(value, list):
            fractions.append(0.5)  # so that every section has room
    return [value for value in fractions if value > 0]


def _to_multiple(value: float, of: int) -> int:
    return max(of, round(value / of) * of)


def _split(total: int, parts: list[int]) -> list[int]:
    sizes = [max(1, total * part // sum(parts)) for part in parts]
    sizes[-1] += total - sum(sizes)
    return sizes
