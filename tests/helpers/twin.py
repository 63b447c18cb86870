"""The plain twin: an ordinary in-memory PyTorch loop that the engine must equal bit for bit.

It shares with the engine only what exactness needs (any two programs would have to): the same micro-batches in the same
order, compute weights rounded the same way, ``_fused_adamw_`` without scalar tails, tied weights whose head and
embedding gradients are summed one after the other, gradients summed in fp32 before they are rounded to bf16, and, in
bf16 on a CPU, attention to documents of packed rows with their lengths rounded up to 32 tokens.
It knows nothing of records, chunks, tiers or schedules.
"""

from collections.abc import Sequence
from pathlib import Path

import torch
from gpu.twin import DeviceTwin
from transformers import AutoModelForCausalLM, PreTrainedConfig


def round_half_away(master: torch.Tensor) -> torch.Tensor:
    """fp32 to bf16, ties away from zero: written differently from the engine's."""
    toward_zero = (master.view(torch.int32) & -65536).view(torch.float32)
    away = (master.view(torch.int32) & 0x8000) != 0
    step = (master.view(torch.int32) & -65536) + 65536
    return torch.where(away, step.view(torch.float32), toward_zero).to(torch.bfloat16)


class Twin(DeviceTwin):
    """Plain training of a model in memory: :class:`gpu.twin.DeviceTwin`, also with other optimizers."""

    def __init__(
        self, checkpoint: str, *, bf16: bool, lr: float, weight_decay: float, max_grad_norm: float | None,
        device: str = "cpu", eps: float = 1e-8, optimizer: str = "adamw",
    ):  # fmt: skip
        self._optimizer, self._in_24_bits = optimizer, bf16 and optimizer == "adamw8bit"
        options = {"lr": lr, "weight_decay": weight_decay, "eps": eps}
        super().__init__(
            Path(checkpoint), torch.bfloat16 if bf16 else torch.float32, device, max_grad_norm, options
        )
        if self._in_24_bits:
            self.masters = {
                name: in_24_bits(master) if self._splits(name) else master
                for name, master in self.masters.items()
            }
            self._load()

    def _update_one(self, name: str, master: torch.Tensor, gradient: torch.Tensor, decay: float) -> None:
        mean, variance = self._moments[name]
        super()._update_one(name, master, gradient, decay)
        if self._optimizer == "adamw8bit":
            for moment, signed in ((mean, True), (variance, False)):
                moment.copy_(in_8_bits(moment, signed))
            if self._in_24_bits and self._splits(name):
                master.copy_(in_24_bits(master))

    def _splits(self, name: str) -> bool:
        return self._parameters[name].dtype == torch.bfloat16


def in_8_bits(values: torch.Tensor, signed: bool) -> torch.Tensor:
    """Moments as they are after having been kept in 8 bits, written out from FlashOptim (arXiv 2602.23349).

    Means by ``2x / (1 + |x|)``, variances by their roots; unlike there, no positive variance becomes 0.
    """
    blocks = values.view(-1, 128)
    scales = blocks.abs().amax(1, keepdim=True)
    quotients = blocks / torch.where(scales > 0, scales, 1)
    if signed:
        levels = torch.round(2 * quotients / (1 + quotients.abs()) * 127).double() / 127
        return ((levels / (2 - levels.abs())).float() * scales).view(-1)
    levels = torch.round(quotients.double().sqrt().float() * 255).double()
    levels[(quotients > 0) & (levels == 0)] = 1
    return ((levels / 255).square().float() * scales).view(-1)


def in_24_bits(master: torch.Tensor) -> torch.Tensor:
    """fp32 with 16 of 24 significant bits, ties away from zero: by arithmetic, unlike the engine's."""
    mantissa, exponent = torch.frexp(master.double())
    rounded = mantissa.sign() * torch.floor(mantissa.abs() * 65536 + 0.5)
    return torch.ldexp(rounded, exponent - 16).float()


def tiny_configs() -> dict[str, PreTrainedConfig]:
    """Small models of many families, odd sizes included."""
    from transformers import (
        Gemma3TextConfig,
        GPT2Config,
        GPTNeoXConfig,
        LlamaConfig,
        MixtralConfig,
        OPTConfig,
        Qwen3Config,
        Qwen3MoeConfig,
    )

    common = {
        "vocab_size": 211, "hidden_size": 48, "intermediate_size": 72, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
        "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
    }  # fmt: skip
    return {
        "llama": LlamaConfig(**common),
        "llama-tied": LlamaConfig(**common, tie_word_embeddings=True),
        "gpt2": GPT2Config(
            vocab_size=211, n_embd=48, n_layer=3, n_head=4, n_positions=64, resid_pdrop=0.0, embd_pdrop=0.0,
            attn_pdrop=0.0, bos_token_id=1, eos_token_id=2,
        ),
        "qwen3": Qwen3Config(**common, head_dim=16),
        "gemma3": Gemma3TextConfig(
            **common, head_dim=16, sliding_window=8,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        ),
        "opt": OPTConfig(
            vocab_size=211, hidden_size=48, ffn_dim=72, num_hidden_layers=3, num_attention_heads=4,
            max_position_embeddings=64, word_embed_proj_dim=32, dropout=0.0, attention_dropout=0.0,
        ),
        "neox": GPTNeoXConfig(
            vocab_size=211, hidden_size=48, intermediate_size=72, num_hidden_layers=3, num_attention_heads=4,
            max_position_embeddings=64, bos_token_id=1, eos_token_id=2,
        ),
        "mixtral": MixtralConfig(**common, num_local_experts=4),
        "qwen3-moe": Qwen3MoeConfig(
            **common, head_dim=16, moe_intermediate_size=24, num_experts=4, num_experts_per_tok=2
        ),
    }  # fmt: skip


def save_checkpoints(root: Path, names: Sequence[str]) -> Path:
    """Save models of these tiny configurations, with random weights, each in its own folder; returns ``root``."""
    for name in names:
        torch.manual_seed(1)
        AutoModelForCausalLM.from_config(tiny_configs()[name]).save_pretrained(root / name)
    return root
