"""What the fields of transformers' configurations count, told by their names."""

import re

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
NOT_SIZES = re.compile(r"^(id2label|label2id|transformers_version|architectures|seed|pretraining_tp)$")
