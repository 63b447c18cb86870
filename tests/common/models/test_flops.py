import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

from common.models.flops import active_parameters, hardware_flops_per_token, model_flops_per_token
from common.models.meta_model import build_meta_model
from common.models.presets import load_config
from common.models.structure import find_blocks
from tests.helpers.models.families import FAMILIES, MIXED, family_config


def test_gpt3_by_hand():
    config, _ = load_config("gpt3-13b")
    layers, hidden, vocab, context, seq = 40, 5120, 50257, 2048, 1024
    parameters = layers * (12 * hidden**2 + 13 * hidden) + (vocab + context) * hidden + 2 * hidden
    attention = 12 * layers * hidden * seq
    assert model_flops_per_token(config, seq) == 6 * parameters + attention
    blocks = layers * (12 * hidden**2 + 13 * hidden)
    assert hardware_flops_per_token(config, seq) == 6 * parameters + attention + 2 * blocks + attention / 3


@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in MIXED])
def test_blocks_agree_with_counted_products(family):
    """Against torch's counter of matrix products; what only we count (norms, biases) is small in a wide model."""
    sizes = {"n_embd": 256} if family == "gpt2" else {"hidden_size": 256, "head_dim": 64}
    sizes |= {"intermediate_size": 768, "ffn_dim": 1024, "word_embed_proj_dim": 256}
    config = family_config(family, **sizes, sliding_window=64)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    seq = 32
    with FlopCounterMode(display=False) as counter:
        model(torch.zeros(1, seq, dtype=torch.long)).logits.sum().backward()
    embedding = model.get_input_embeddings().weight.numel()
    positions = sum(p.numel() for n, p in model.named_parameters() if "embed_positions" in n or "wpe" in n)
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    lookup = positions + (0 if tied else embedding)
    assert counter.get_total_flops() / seq + 6 * lookup == pytest.approx(model_flops_per_token(model, seq), rel=0.01)


@pytest.mark.parametrize(("family", "share"), [("mixtral", 2 / 4), ("qwen3_moe", 2 / 8)])
def test_only_visited_experts_count(family, share):
    model = build_meta_model(family_config(family))
    _, blocks = find_blocks(model)
    experts = sum(p.numel() for n, p in blocks.named_parameters() if p.ndim == 3)
    assert experts > 0
    assert active_parameters(model, blocks) == sum(p.numel() for p in blocks.parameters()) - (1 - share) * experts
