"""Attention by chunk against a dense twin in fp64, and transformers' models in chunks against the whole row."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.masking_utils import (
    bidirectional_mask_function,
    chunked_causal_mask_function,
    sliding_window_causal_mask_function,
)
from transformers.models.auto.configuration_auto import AutoConfig

from common.models.attention import chunked, tiles
from common.models.attention.chunked import ChunkMask, attention_by_chunk
from common.models.attention.isolation import configurations
from tests.helpers.cuda_branch import cuda_branch


def _twin(query, key, value, mask, scale, cap, sinks, documents):
    """Compute all scores at once."""
    heads, groups = query.shape[1], key.shape[1]
    key, value = (each.repeat_interleave(heads // groups, 1) for each in (key, value))
    scores = query @ key.mT * scale
    if cap:
        scores = cap * torch.tanh(scores / cap)
    queries, keys = scores.shape[-2:]
    # Tokens of the row that keys belong to
    row = torch.arange(mask.offset + queries - keys, mask.offset + queries)
    own = row[-queries:, None]
    seen = row <= own
    if mask.window:
        seen &= row > own - mask.window
    starts = torch.tensor(documents or [0])
    document, own_document = (torch.bucketize(each, starts, right=True) for each in (row, own))
    seen &= document == own_document
    if mask.chunk:
        row, own = row - starts[document - 1], own - starts[own_document - 1]
        seen &= row // mask.chunk == own // mask.chunk
    scores = scores.masked_fill(~seen, float("-inf"))
    if sinks is not None:
        scores = torch.cat((scores, sinks[:, None, None].expand(*scores.shape[:-1], 1)), -1)
    return (scores.softmax(-1)[..., :keys] @ value).transpose(1, 2)


CASES = {
    "causal": {},
    "first": {"keys": 41},
    "one query": {"queries": 1},
    "window": {"window": 24},
    "wide window": {"window": 70, "queries": 90, "keys": 150},
    "window of all": {"window": 500},
    "chunks": {"chunk": 16, "offset": 100},
    "dropped keys": {"chunk": 50, "offset": 87},
    "shared": {"groups": 2},
    "sinks": {"sinks": True, "window": 30, "groups": 2},
    "cap": {"cap": 5.0},
    "cap in a window": {"cap": 5.0, "window": 24, "groups": 2},
    "narrow values": {"width": 24},
    "wide values": {"width": 40, "window": 24},
    "scale": {"scale": 0.3, "rows": 2},
    "documents": {"documents": [50, 107, 108, 130]},
    "documents in windows": {"documents": [90, 120], "window": 24, "sinks": True},
    "documents in chunks": {"documents": [90, 111], "chunk": 16, "groups": 2},
    "documents before dropped keys": {
        "documents": [10, 130],
        "keys": 61,
        "offset": 100,
        "cap": 5.0,
        "window": 24,
    },
    "all": {"cap": 4.0, "window": 24, "groups": 1, "width": 8, "sinks": True, "rows": 2},
}


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch):
    monkeypatch.setattr(tiles, "KEYS", 32)
    monkeypatch.setattr(tiles, "_BANDED_QUERIES", 32)
    monkeypatch.setattr(tiles, "SCORES", 700)


def _compare(dtype, case, device_tolerance):
    torch.manual_seed(0)
    case = {"queries": 41, "keys": 141, "groups": 4, "width": 32, "rows": 1, "scale": None, **case}
    rows, queries, keys = case["rows"], case["queries"], case["keys"]
    shapes = (
        (rows, 4, queries, 32),
        (rows, case["groups"], keys, 32),
        (rows, case["groups"], keys, case["width"]),
    )
    inputs = [torch.randn(shape, dtype=torch.float64).to(dtype).requires_grad_() for shape in shapes]
    sinks = torch.randn(4, dtype=torch.float64).to(dtype).requires_grad_() if case.get("sinks") else None
    mask = ChunkMask(case.get("offset", keys - queries), case.get("window", 0), case.get("chunk", 0))
    module = torch.nn.Module()
    options = {"scaling": case["scale"], "softcap": case.get("cap"), "s_aux": sinks}
    documents = case.get("documents", ())
    with attention_by_chunk([], documents):
        result, _ = chunked._by_chunk(module, *inputs, mask, **options)
    twins = [each.detach().double().requires_grad_() for each in inputs]
    twin_sinks = None if sinks is None else sinks.detach().double().requires_grad_()
    expected = _twin(*twins, mask, case["scale"] or 32**-0.5, case.get("cap"), twin_sinks, documents)
    flowing = torch.randn_like(expected)
    result.backward(flowing.to(dtype))
    expected.backward(flowing)
    forward, backward = device_tolerance
    torch.testing.assert_close(result.double(), expected, rtol=forward, atol=forward)
    pairs = list(zip([*inputs, *[sinks] * (sinks is not None)], [*twins, twin_sinks], strict=False))
    for each, twin in pairs:
        assert each.grad.dtype == dtype
        torch.testing.assert_close(
            each.grad.double(), twin.grad, rtol=backward, atol=backward * float(twin.grad.abs().max())
        )


@pytest.mark.parametrize("name", CASES)
def test_equals_dense_attention(name):
    _compare(torch.float32, CASES[name], (1e-6, 1e-5))


@pytest.mark.parametrize("name", ["causal", "wide window", "sinks", "cap", "narrow values"])
def test_in_bf16(name):
    _compare(torch.bfloat16, CASES[name], (1e-2, 2e-2))


@pytest.mark.parametrize("name", ["causal", "window", "chunks", "shared", "sinks", "narrow values"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_in_the_branches_for_cuda(dtype, name):
    with cuda_branch():
        _compare(dtype, CASES[name], (1e-6, 1e-5) if dtype == torch.float32 else (1e-2, 2e-2))


def test_chunks_count_as_many_operations_as_the_whole_row():
    def operations(mask, first, last):
        inputs = [
            torch.randn(1, heads, tokens, 16) for heads, tokens in ((4, last - first), (2, last), (2, last))
        ]
        inputs = [each.requires_grad_() for each in inputs]
        with FlopCounterMode(display=False) as counter:
            chunked._by_chunk(torch.nn.Module(), *inputs, mask)[0].sum().backward()
        return counter.get_total_flops()

    product = 2 * 4 * 16  # for each pair of tokens; forward are two, backward five
    assert (
        sum(operations(ChunkMask(a), a, b) for a, b in ((0, 40), (40, 80), (80, 96))) == 7 * product * 96**2
    )
    assert operations(ChunkMask(80, window=8), 80, 96) == 7 * product * 16 * (2 * 8 - 1)
    assert operations(ChunkMask(80, chunk=16), 80, 96) == 7 * product * 16**2


@pytest.mark.parametrize(
    ("reason", "mask", "options"),
    [
        ("merely causal", None, {}),
        ("merely causal", torch.zeros(1, 1, 4, 4), {}),
        ("dropout", ChunkMask(0), {"dropout": 0.1}),
        ("a bias", ChunkMask(0), {"position_bias": torch.zeros(1, 1, 4, 4)}),
    ],
)
def test_rejects_what_is_not_cut(reason, mask, options):
    inputs = [torch.randn(1, 1, 4, 8)] * 3
    with pytest.raises(NotImplementedError, match=reason):
        chunked._by_chunk(torch.nn.Module(), *inputs, mask, **options)


def test_masks_that_are_not_merely_causal():
    assert chunked._chunk_mask(q_offset=3) == ChunkMask(3)
    assert chunked._chunk_mask(3, sliding_window_causal_mask_function(8), local_size=8) == ChunkMask(
        3, window=8
    )
    ranges = chunked_causal_mask_function(8, torch.zeros(1, dtype=torch.long))
    assert chunked._chunk_mask(3, ranges, local_size=8) == ChunkMask(3, chunk=8)
    assert chunked._chunk_mask(mask_function=bidirectional_mask_function) is None
    with pytest.raises(NotImplementedError, match="merely causal"):
        chunked._chunk_mask(allow_is_causal_skip=False)
    with pytest.raises(NotImplementedError, match="padding"):
        chunked._chunk_mask(attention_mask=torch.tensor([[False, True]]))


FAMILIES = {
    "llama": {"num_key_value_heads": 2},
    "gpt2": {"n_embd": 64, "n_layer": 2, "n_head": 4, "attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0},
    "gemma2": {"num_key_value_heads": 2, "head_dim": 16, "sliding_window": 24, "attn_logit_softcapping": 5.0},
    "gpt_oss": {"num_key_value_heads": 2, "head_dim": 16, "sliding_window": 24, "num_local_experts": 4},
    "llama4_text": {"num_key_value_heads": 2, "head_dim": 16, "attention_chunk_size": 24, "num_hidden_layers": 4},
    "deepseek_v3": {
        "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2, "q_lora_rank": 16,
        "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16,
        "moe_intermediate_size": 32,
    },
}  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_models_in_chunks_equal_the_whole_row(family):
    torch.manual_seed(0)
    settings = {
        "vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, **FAMILIES[family],
    }  # fmt: skip
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **settings), dtype=torch.float32)
    ids, flowing = torch.randint(3, 64, (2, 100)), torch.randn(2, 100, 64)
    expected = model(input_ids=ids, use_cache=False).logits
    (expected * flowing).sum().backward()
    gradients = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
    model.zero_grad()
    cache = DynamicCache()
    with attention_by_chunk(configurations(model)):
        parts = [
            model(input_ids=ids[:, a:b], position_ids=torch.arange(a, b)[None], past_key_values=cache).logits
            for a, b in ((0, 37), (37, 74), (74, 100))
        ]
    logits = torch.cat(parts, 1)
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)
    (logits * flowing).sum().backward()
    largest = max(float(gradient.abs().max()) for gradient in gradients.values())
    for name, weight in model.named_parameters():
        if name in gradients:
            torch.testing.assert_close(weight.grad, gradients[name], rtol=1e-5, atol=1e-5 * largest)
