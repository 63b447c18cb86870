"""Keeping the documents of a packed row apart, for models that do not do so themselves."""

import torch


def document_mask(position_ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The additive attention mask of packed documents: 0 for earlier tokens of the same document, else the minimum.

    For the families of transformers 5 that take no notice of ``position_ids`` in their mask but accept this as
    ``attention_mask``: OPT, BioGPT, XGLM, and GPT-OSS up to its sliding window (a full mask
    replaces the window). Of those that neither do nor accept it, ALiBi models (BLOOM, MPT, Falcon) and
    recurrent ones (Mamba, Jamba, Qwen3-Next, Falcon-H1) let documents of a row see each other.

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
