"""Documents that share a row do not see each other: packed logits equal those of each document alone."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    PreTrainedModel,
)

from common.data import document_mask

VOCABULARY = 97
ROWS = [[5, 1, 7, 1, 2, 8], [10, 14]]  # lengths of the documents in each row; the last may be padding


def llama(attention: str) -> PreTrainedModel:
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, attn_implementation=attention,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def gpt2(attention: str) -> PreTrainedModel:
    config = GPT2Config(
        vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=64, resid_pdrop=0.0, embd_pdrop=0.0,
        attn_pdrop=0.0, attn_implementation=attention,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def opt(attention: str) -> PreTrainedModel:
    config = OPTConfig(
        vocab_size=VOCABULARY, hidden_size=32, ffn_dim=64, num_hidden_layers=2, num_attention_heads=4,
        word_embed_proj_dim=32, max_position_embeddings=64, dropout=0.0, attn_implementation=attention,
    )  # fmt: skip
    return OPTForCausalLM(config)


def largest_difference(make: Callable[[str], PreTrainedModel], attention: str, rows: int, **packed: Any) -> float:
    """Between a packed batch and its documents one by one, relative to the largest logit."""
    torch.manual_seed(0)
    model = make(attention)
    for weight in model.parameters():
        if weight.ndim > 1:
            torch.nn.init.normal_(weight, std=0.3)  # so that what is attended to shows
    ids = torch.randint(VOCABULARY, (rows, 24))
    positions = torch.stack([torch.cat([torch.arange(n) for n in lengths]) for lengths in ROWS[:rows]])
    if packed.pop("with_mask", False):
        packed["attention_mask"] = document_mask(positions, torch.float32)
    worst = 0.0
    with torch.no_grad():
        logits = model(input_ids=ids, position_ids=positions, **packed).logits
        for row, lengths in enumerate(ROWS[:rows]):
            for at, length in zip([sum(lengths[:i]) for i in range(len(lengths))], lengths, strict=True):
                alone = model(input_ids=ids[row : row + 1, at : at + length], use_cache=False).logits[0]
                worst = max(worst, float((logits[row, at : at + length] - alone).abs().max() / alone.abs().max()))
    return worst


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("make", [llama, gpt2])
def test_restarting_positions_keep_documents_apart(
    make: Callable[[str], PreTrainedModel], attention: str, rows: int
) -> None:
    assert largest_difference(make, attention, rows, use_cache=False) < 1e-5
    # With a cache, which is the default of most configurations, they are not: callers must switch it off.
    assert largest_difference(make, attention, rows, use_cache=True) > 0.1


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_mask_for_models_that_ignore_positions(attention: str, rows: int) -> None:
    assert largest_difference(opt, attention, rows, use_cache=False) > 0.1, "OPT has learned it: drop the mask"
    assert largest_difference(opt, attention, rows, use_cache=False, with_mask=True) < 1e-5


def test_mask_against_plain_loops() -> None:
    positions = torch.tensor([[0, 1, 2, 0, 0, 1], [0, 1, 2, 3, 4, 5]])
    mask = document_mask(positions, torch.bfloat16)
    assert mask.dtype == torch.bfloat16
    assert mask.shape == (2, 1, 6, 6)
    for row in range(2):
        for query in range(6):
            first = query - int(positions[row, query])
            seen = [first <= key <= query for key in range(6)]
            assert (mask[row, 0, query] == 0).tolist() == seen
            assert mask[row, 0, query].isfinite().all()
