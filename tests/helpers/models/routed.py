"""A causal LM with experts in a list, as families had them: those that no token is sent to get no gradient."""

from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput


class RoutedConfig(PreTrainedConfig):
    model_type = "routed_test"

    def __init__(
        self, vocab_size: int = 67, hidden_size: int = 36, experts: int = 8, layers: int = 2, **kwargs: Any
    ):
        self.vocab_size, self.hidden_size, self.experts, self.num_hidden_layers = (
            vocab_size, hidden_size, experts, layers,
        )  # fmt: skip
        kwargs.setdefault("tie_word_embeddings", False)
        super().__init__(**kwargs)


class RoutedBlock(nn.Module):
    """Each token goes to one expert, for any neighbors. The last expert is not for tokens."""

    def __init__(self, config: RoutedConfig):
        super().__init__()
        self.norm = nn.LayerNorm(config.hidden_size)
        self.router = nn.Linear(config.hidden_size, config.experts - 1)
        self.experts = nn.ModuleList(
            nn.Linear(config.hidden_size, config.hidden_size) for _ in range(config.experts)
        )

    def forward(self, hidden_states: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        values = self.norm(hidden_states)
        weight, chosen = self.router(values).softmax(-1).max(-1)
        result = torch.zeros_like(values)
        for number in chosen.unique():
            where = (chosen == number).nonzero(as_tuple=True)
            result[where] = self.experts[number](values[where]) * weight[where].unsqueeze(-1)
        return hidden_states + result


class RoutedForCausalLM(PreTrainedModel):
    config_class = RoutedConfig

    def __init__(self, config: RoutedConfig):
        super().__init__(config)
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        self.blocks = nn.ModuleList(RoutedBlock(config) for _ in range(config.num_hidden_layers))
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.embed

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def forward(
        self, input_ids: torch.Tensor, labels: torch.Tensor | None = None, position_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None, use_cache: bool = False, **kwargs: Any,
    ) -> CausalLMOutput:  # fmt: skip
        hidden = self.embed(input_ids)
        for block in self.blocks:
            hidden = block(hidden)
        logits = self.lm_head(hidden)
        loss = (
            None if labels is None else self.loss_function(logits, labels, self.config.vocab_size, **kwargs)
        )
        return CausalLMOutput(loss=loss, logits=logits)


AutoConfig.register(RoutedConfig.model_type, RoutedConfig)
AutoModelForCausalLM.register(RoutedConfig, RoutedForCausalLM)
