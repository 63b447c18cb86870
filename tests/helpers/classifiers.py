"""Sizes and batches of small classifiers."""

import torch

SIZES = {
    "vocab_size": 99, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0, "num_labels": 5,
}  # fmt: skip


def batch(case: str, seed: int) -> dict[str, torch.Tensor]:
    """Three rows of several lengths, padded on the right."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, 99, (3, 16), generator=generator)
    lengths = torch.tensor([[16], [9], [12]])
    ids[torch.arange(16) >= lengths] = 0
    labels = torch.randint(0, 5, (3,) if case == "sequence" else (3, 16), generator=generator)
    if case == "token":
        labels[ids == 0] = -100
    return {"input_ids": ids, "labels": labels, "attention_mask": (ids != 0).long()}
