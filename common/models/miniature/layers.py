"""Choose the layers of a miniature: of each kind the first and the last, in order."""

import re
from collections.abc import Callable
from itertools import pairwise
from typing import Any

DEPTH = re.compile(
    r"^(num_hidden_layers|n_layers?|num_layers|num_blocks|depth|(num_)?(de|en)coder_layers|num_layers_per_stack"
    r"|conf_num_hidden_layers|num_global_layers)$"
)
WIDTHS = ("hidden_size", "d_model", "n_embd", "emb_dim", "embedding_dim", "dim_model", "hidden_dim")
HEAD_COUNTS = (
    "num_attention_heads",
    "n_head",
    "n_heads",
    "num_heads",
    "decoder_attention_heads",
    "num_decoder_attention_heads",
    "attention_heads",
)
HEAD_COUNT = re.compile(r"(^|_)heads$|_heads_|^n_heads?$|^n_head$|query_groups$")
HEAD_DIM_NAME = re.compile(r"head_?dim$|head_size$|^d_head$|^d_kv$|^dim_head$|kv_channels$|d_head$|^rotary_dim$")
VOCABULARY_SIZE = re.compile(r"vocab_size|^vocab_offset$")
TOKEN_ID = re.compile(r"_(id|ids|idx|index)$")
NOT_A_COUNT = re.compile(r"size|dim|period|offset|interval|layer|group|per_tok")
CHOSEN = re.compile(r"(experts_per_tok(en)?|topk|top_k|moe_k|top_k_experts)$")
GROUPS = re.compile(r"(^|_)n_?groups?$|expert_group$|^o_groups$|^mamba_ngroups$")
TOKEN_COUNT = re.compile(
    r"window(?!_layers|_pattern)|chunk|local_attention|local_attn|block_size|rel_extent|index_topk|index_block|floor_scale"
    r"|n_floor|local_blocks"
)
POSITIONS = re.compile(r"position|max_seq|context_length|n_ctx|max_length|max_(source|target)|seq_length|max_distance")
FROM_FRONT = re.compile(r"^first_k_|num_dense_layers|max_window_layers|layer_start_index|num_hash_layers")
FROM_BACK = re.compile(r"kv_shared_layers$")
PERIOD = re.compile(
    r"period$|interval$|every_n_layers$|layer_group_size$|sparse_step$|sliding_window_pattern$|_pattern$"
)
OFFSET = re.compile(r"layer_offset$")
TOWER = re.compile("vision|audio|siglip|vit|clip|encodec|t5")
ROTARY = ("rope_parameters", "rope_theta", "rope_scaling", "rotary_dim", "rotary_pct", "partial_rotary_factor")
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
    """The layers of a configuration that remain.

    Args:
        config: the configuration, for a number of layers under another name; None for a plain dictionary.

    Attributes:
        depth: number of layers; 0 if unknown.
        indices: the remaining layers, sorted.
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
            positions = [index for index, other in enumerate(kinds) if other == kind]
            chosen |= {positions[0], positions[-1]}
        for index in range(self.depth):
            if len(chosen) >= least:
                break
            chosen.add(index)
        self.indices = sorted(chosen)

    def _kinds(self, name: str, value: Any) -> list[Any] | None:
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
            return [str(item) for item in value]
        if _is_by_layer(value):
            return [str(value.get(f"{index:02}", value.get(str(index)))) for index in range(depth)]
        return None

    def _least_layers(self, name: str, value: Any) -> int:
        """Return how many layers show the pattern ``name`` once and its beginning again."""
        if isinstance(value, list | tuple) and "types" in name and 1 < len(value) < self.depth:
            return len(value) + 1
        if isinstance(value, int) and PERIOD.search(name) and value > 1 and self.depth > 2:
            return min(self.depth, min(value, 3) + 1)
        return 0

    def select(self, name: str, value: Any, shrink_number: _Shrink, shrink_field: _Shrink) -> Any:
        """Return a field's ``value`` for the remaining layers; None if it is not about single layers.

        Args:
            shrink_number: shrinks a layer's entry in a list, given the field's name and the entry.
            shrink_field: shrinks a field that differs in a layer, given its name and value.
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
            return [position for position, index in enumerate(layers) if index in value]
        if isinstance(value, list | tuple) and len(value) == depth and depth > 2:
            return [shrink_number(name, value[index]) for index in layers]
        if _is_by_layer(value):
            values = {}
            for position, index in enumerate(layers):
                item = value.get(f"{index:02}", value.get(str(index)))
                if item is not None:
                    values[f"{position:02}"] = {key: shrink_field(key, entry) for key, entry in item.items()}
            return values
        return None


def _is_index_list(name: str, value: Any, depth: int) -> bool:
    if not isinstance(value, list) or not value or not re.search(r"layer|idx|ind(ex|ic)es", name):
        return False
    if not all(type(item) is int and 0 <= item < depth for item in value):
        return False
    return all(first < second for first, second in pairwise(value))


def _is_by_layer(value: Any) -> bool:
    return isinstance(value, dict) and bool(value) and all(isinstance(key, str) and key.isdigit() for key in value)
