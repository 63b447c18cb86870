"""Keeping the documents of a packed row apart, for models that do not do so themselves."""

import torch


def document_mask(position_ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The additive attention mask of packed documents: 0 for earlier tokens of the same document, else the minimum.

    For the families of transformers 5 that do not look at ``position_ids`` for their mask, but accept this as
    ``attention_mask``: OPT, Falcon (with rotary embeddings), MPT, BioGPT and XGLM; also GPT-OSS, for rows no longer
    than its sliding window, which a full mask replaces. Others have no such remedy, and documents of a row do
    see each other: BLOOM and Falcon with ALiBi take only padding masks, and recurrent layers (Mamba, Jamba,
    RecurrentGemma, Qwen3-Next, Falcon-H1) no mask at all.

    Args:
        position_ids: int64 [batch, seq_len], restarting with each document.
        dtype: that of the attention scores.

    Returns:
        ``dtype`` [batch, 1, seq_len, seq_len]: ``seq_len`` squared numbers per row, where other families need none.
    """
    seq_len = position_ids.shape[1]
    starts = torch.diff(position_ids, prepend=position_ids[:, :1] - 1) != 1
    document = starts.cumsum(-1)  # [batch, seq_len]
    same = document[:, :, None] == document[:, None, :]  # [batch, query, key]
    seen = same & torch.ones(seq_len, seq_len, dtype=torch.bool, device=position_ids.device).tril()
    lowest = torch.finfo(dtype).min
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill(~seen, lowest)[:, None]
