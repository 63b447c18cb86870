"""What PyTorch's allocator reserves while a step computes is at most what is planned for computing."""

from typing import Any

import pytest
import torch
from peft import LoraConfig
from torch import nn
from torch.utils._pytree import tree_map
from transformers import (
    DeepseekV3Config,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    MixtralConfig,
    PreTrainedConfig,
    Qwen3MoeConfig,
)

from fuyou.layout.record import Precision
from fuyou.model.blocks.weightless import on_meta
from fuyou.model.loss.cross_entropy import cross_entropy
from fuyou.model.open_model import OpenModel
from fuyou.model.recompute.block_trace import AttentionOf
from fuyou.schedule.batch import Batch
from fuyou.schedule.workspace import Workspace
from tests.helpers.caching_allocator import Allocating, CachingAllocator

_TWO = {"num_hidden_layers": 2}
CONFIGS: dict[str, PreTrainedConfig] = {
    "llama 8B": LlamaConfig(**_TWO, hidden_size=4096, intermediate_size=14336, num_attention_heads=32,
                            num_key_value_heads=8, vocab_size=128256),
    "gpt2 1.5B": GPT2Config(n_layer=2, n_embd=1600, n_head=25, attn_pdrop=0.0),
    "gemma3 4B": Gemma3TextConfig(**_TWO, hidden_size=2560, intermediate_size=10240, num_attention_heads=8,
                                  num_key_value_heads=4, head_dim=256, sliding_window=1024, vocab_size=262208),
    "mixtral 8x7B": MixtralConfig(**_TWO, hidden_size=4096, intermediate_size=14336, num_local_experts=8),
    "qwen3-moe 30B": Qwen3MoeConfig(**_TWO, hidden_size=2048, moe_intermediate_size=768, num_experts=128,
                                    num_experts_per_tok=8, num_attention_heads=32, num_key_value_heads=4, head_dim=128,
                                    vocab_size=151936),
    "deepseek 16B": DeepseekV3Config(**_TWO, hidden_size=2048, intermediate_size=10944, moe_intermediate_size=1408,
                                     num_attention_heads=16, num_key_value_heads=16, n_routed_experts=64,
                                     num_experts_per_tok=6, n_shared_experts=2, n_group=1, topk_group=1,
                                     first_k_dense_replace=1, q_lora_rank=None, kv_lora_rank=512, vocab_size=102400),
}  # fmt: skip


def replay(model: OpenModel, batch: Batch, columns: int) -> CachingAllocator:
    """Replay two steps of two micro-batches through the last block and the head, with the attention of a GPU."""
    stack, layer, dtype = model.stack, len(model.stack.blocks) - 1, model.layout.precision.dtype
    block = stack.blocks[layer]
    ids = torch.zeros(batch.micro_rows, batch.seq_len, dtype=torch.long)
    _, calls = stack.embed_without_weights({"input_ids": ids})

    def to_meta(value: Any) -> Any:
        return value.to("meta") if isinstance(value, torch.Tensor) else value

    args, kwargs = tree_map(to_meta, calls.arguments[layer])
    hidden = torch.empty(calls.hidden_shape, dtype=dtype, device="meta")
    head = nn.Parameter(torch.empty(model.config.vocab_size, hidden.shape[-1], dtype=dtype, device="meta"))
    head.requires_grad_(model.adapters is None)
    targets, items = ids.to("meta"), torch.empty((), device="meta")
    for parameter in (*block.parameters(), head):
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(lambda leaf: setattr(leaf, "grad", None))
    allocator = CachingAllocator()

    def forward(states: torch.Tensor) -> torch.Tensor:
        result = block(states, *args, **kwargs)
        return result if isinstance(result, torch.Tensor) else result[0]

    with on_meta(block), AttentionOf("cuda", stack.kernels), Allocating(allocator):
        for micro in (0, 1) * 2:
            with torch.no_grad():
                forward(hidden)
            if micro:
                for start in range(0, batch.seq_len, columns):
                    states = hidden[:, start : start + columns].detach().requires_grad_()
                    logits = nn.functional.linear(states, head)
                    _, gradient = cross_entropy(logits, targets[:, start : start + columns], items, True)
                    logits.backward(gradient)
                    del states, logits, gradient
                for _ in range(2):
                    states = hidden.detach().requires_grad_()
                    forward(states).backward(hidden)
                    del states
    return allocator


@pytest.mark.parametrize(("name", "rows", "tokens", "adapters"), [
    ("llama 8B", 4, 1024, False),
    pytest.param("llama 8B", 4, 1024, True, marks=pytest.mark.slow),
    pytest.param("gpt2 1.5B", 4, 1024, False, marks=pytest.mark.slow),
    pytest.param("gemma3 4B", 8, 1024, False, marks=pytest.mark.slow),
    pytest.param("mixtral 8x7B", 4, 1024, False, marks=pytest.mark.slow),
    pytest.param("qwen3-moe 30B", 16, 512, False, marks=pytest.mark.slow),
    ("qwen3-moe 30B", 1, 1024, True),
    pytest.param("deepseek 16B", 4, 2048, False, marks=pytest.mark.slow),
])  # fmt: skip
def test_reserved_memory_is_planned(name: str, rows: int, tokens: int, adapters: bool) -> None:
    lora = LoraConfig(r=16, target_modules="all-linear") if adapters else None
    model = OpenModel(CONFIGS[name], Precision(torch.bfloat16), torch.device("cpu"), lora)
    batch = Batch(2 * rows, tokens, rows)
    for columns in (tokens, 64):
        planned = Workspace(model.layout, model.config, cpu=False).nbytes(batch, columns)
        allocator = replay(model, batch, columns)
        assert allocator.most_asked <= allocator.reserved <= planned <= 5 * allocator.reserved
