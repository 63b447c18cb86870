"""Rotary embeddings that depend on lengths: in any company, a document gets the logits that it gets alone."""

import copy
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from common.data.documents import Documents
from common.models.attention.documents import padding_known, rotate_by_document
from common.models.attention.isolation import DocumentSeparator, Isolation

LENGTHS = (16, 60, 20, 80, 16)
ROPES: dict[str, dict[str, Any]] = {
    "dynamic": {"rope_type": "dynamic"},
    "longrope": {
        "rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [3.0] * 4,
        "original_max_position_embeddings": 32,
    },
}  # fmt: skip


@pytest.mark.parametrize("rope", ROPES)
@torch.no_grad()
def test_logits_of_documents_alone(rope: str) -> None:
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=32 if rope == "dynamic" else 128, initializer_range=0.2,
        rope_parameters={"rope_theta": 1e4, "factor": 4.0, **ROPES[rope]},
    )  # fmt: skip
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(config).eval()
    documents = [torch.randint(64, (length,)) for length in LENGTHS]
    alone = [copy.deepcopy(model)(input_ids=ids[None]).logits[0] for ids in documents]
    ids, positions = torch.cat(documents)[None], torch.cat([torch.arange(length) for length in LENGTHS])[None]
    padding = torch.arange(96) >= torch.tensor(LENGTHS)[:, None]
    padded = torch.zeros(len(LENGTHS), 96, dtype=torch.long).masked_scatter(~padding, ids[0])
    mixed = copy.deepcopy(model)(input_ids=padded).logits
    assert not torch.allclose(mixed[0, :16], alone[0], atol=1e-2)

    rotate_by_document(model)
    separator = DocumentSeparator(model, Isolation(attention_by_document=True))
    for _ in range(2):  # for any earlier state
        with padding_known({}), separator.apart(Documents.of(positions)):
            packed = model(input_ids=ids, position_ids=positions).logits[0].split(LENGTHS)
        with padding_known({"padding": padding}):
            rows = model(input_ids=padded).logits
        with padding_known({"attention_mask": (~padding).long()}):
            masked = model(input_ids=padded, attention_mask=(~padding).long()).logits
        with padding_known({"attention_mask": (~padding).long().flip(1)}):  # on the left
            left = model(input_ids=padded.flip(1), attention_mask=(~padding).long().flip(1)).logits
        for number, (length, expected) in enumerate(zip(LENGTHS, alone, strict=True)):
            for values in (packed[number], rows[number, :length], masked[number, :length]):
                torch.testing.assert_close(values, expected, rtol=1e-4, atol=1e-4)
            reversed_alone = model(input_ids=documents[number].flip(0)[None]).logits[0]
            torch.testing.assert_close(left[number, -length:], reversed_alone, rtol=1e-4, atol=1e-4)
