"""Noise on embeddings in training: NEFTune (Jain et al. 2023, arXiv:2310.05914)."""

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel


def add_embedding_noise(model: PreTrainedModel, alpha: float) -> None:
    """Let a model add noise to the embeddings ``[B, S, H]`` of its tokens in training, uniform within
    ``alpha / sqrt(S H)`` of 0, as transformers does.

    Args:
        model: of which nothing else changes.
        alpha: strength; 0 adds nothing.
    """
    if not alpha:
        return

    def add(module: nn.Module, _: Any, output: torch.Tensor) -> torch.Tensor:
        # Where the module is passed over (for the head's sake, say), its result means nothing, and no number is drawn.
        if not module.training or "forward" in vars(module):
            return output
        bound = alpha / torch.sqrt(torch.tensor(output.size(1) * output.size(2)))
        return output + torch.zeros_like(output).uniform_(-bound, bound)  # type: ignore[arg-type]  # as transformers does

    model.get_input_embeddings().register_forward_hook(add)
