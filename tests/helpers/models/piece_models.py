"""Small models whose blocks are computed in pieces, with weights and the inputs of one block."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from peft import PeftConfig
from transformers import PreTrainedConfig

from fuyou.layout.record import Precision
from fuyou.model.blocks.calls import BlockCalls
from fuyou.model.open_model import OpenModel
from fuyou.model.streamed_model import StreamedModel
from tests.helpers.models.small_models import small_config

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass
class Inputs:
    """What a block is called with, for several micro-batches."""

    hidden: list[torch.Tensor]
    calls: list[BlockCalls]
    gradients: list[torch.Tensor]


class PieceModel:
    """A small model with random weights.

    Args:
        config: the model's configuration, or a family's name.
        dtype: ``"fp32"`` or ``"bf16"``.
        adapters: trained in place of the model.
        experts: transformers' implementation of experts; None: its default.
    """

    def __init__(
        self, config: PreTrainedConfig | str, dtype: str = "fp32", adapters: PeftConfig | None = None,
        experts: str | None = None,
    ):  # fmt: skip
        config = small_config(config) if isinstance(config, str) else config
        precision = Precision(DTYPES[dtype])
        self.opened = OpenModel(config, precision, torch.device("cpu"), adapters=adapters)
        self.stack: StreamedModel = self.opened.stack
        if experts is not None:
            self.stack.model.config._experts_implementation = experts
        generator = torch.Generator().manual_seed(5)

        def random(meta: torch.Tensor) -> torch.Tensor:
            scale = meta.shape[-1] ** -0.5 if meta.dim() > 1 else 0.1
            value = torch.randn(meta.shape, generator=generator) * scale
            return (value if meta.dim() > 1 else value + 1.0).to(meta.dtype)

        self.weights = {name: random(value) for name, value in self.stack.model.named_parameters()}
        for buffer in self.stack.model.buffers():
            if buffer.isnan().any():
                buffer.copy_(torch.randn(buffer.shape, generator=generator) * 0.1)

    def of_block(self, layer: int) -> dict[str, torch.Tensor]:
        """All parameters of a block."""
        prefix = f"{self.stack.block_prefix}.{layer}."
        return {name: value for name, value in self.weights.items() if name.startswith(prefix)}

    def base_of_block(self, layer: int) -> dict[str, torch.Tensor]:
        """Those that adapters have not added."""
        added = set(self.opened.adapters.names if self.opened.adapters is not None else ())
        return {name: value for name, value in self.of_block(layer).items() if name not in added}

    def inputs(self, rows: Sequence[int], tokens: int = 13, documents: bool = False) -> Inputs:
        """Inputs of a block for micro-batches of this many rows each."""
        generator = torch.Generator().manual_seed(6)
        found = Inputs([], [], [])
        for count in rows:
            ids = torch.randint(0, self.stack.model.config.vocab_size, (count, tokens), generator=generator)
            batch = {"input_ids": ids}
            if documents:
                lengths = torch.randint(3, tokens, (1,), generator=generator).item()
                batch["position_ids"] = torch.arange(tokens).remainder(lengths).expand(count, -1).contiguous()
            with torch.no_grad(), self.stack.bound(self.weights, before=True):
                hidden, calls = self.stack.embed(batch)
            found.hidden.append(torch.randn(hidden.shape, generator=generator).to(hidden.dtype))
            found.gradients.append(torch.randn(hidden.shape, generator=generator).to(hidden.dtype))
            found.calls.append(calls)
        return found
