"""The plain twin: an ordinary in-memory PyTorch loop that the engine must equal bit for bit.

It shares with the engine only what exactness needs (any two programs would have to): the same micro-batches in the same
order, compute weights rounded the same way, ``_fused_adamw_`` without scalar tails, tied weights whose head and
embedding gradients are summed one after the other, gradients summed in fp32 before they are rounded to bf16, and, in
bf16 on a CPU, attention to documents of packed rows with their lengths rounded up to 32 tokens.
It knows nothing of records, chunks, tiers or schedules.

On a GPU the model computes there; masters, moments and the update stay on the CPU, as they do in the engine.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, Trainer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

LINE = 128  # elements: a multiple of every vector width
BY_DOCUMENT = "twin_by_document"


def attention_by_document(module, query, key, value, attention_mask, dropout=0.0, scaling=None, **kwargs):
    """Attention in a plain loop over the documents of packed rows: each as if it were alone."""
    window, outputs = kwargs.get("sliding_window"), []
    for row, positions in enumerate(module.documents):
        starts = [index for index, position in enumerate(positions) if position == 0] + [len(positions)]
        for start, end in pairwise(starts):
            part = [each[row : row + 1, :, start:end] for each in (query, key, value)]
            length = end - start
            if query.dtype == torch.bfloat16 and query.device.type == "cpu":  # zeros behind, which nothing sees
                part = [nn.functional.pad(each, (0, 0, 0, -length % 32)) for each in part]
            mask = None
            if window and length > window:
                token = torch.arange(part[0].shape[2])
                mask = ((token <= token[:, None]) & (token > token[:, None] - window))[None, None].to(query.device)
            shared = query.shape[1] != key.shape[1]
            outputs.append(
                nn.functional.scaled_dot_product_attention(
                    *part, mask, dropout, mask is None, scale=scaling, enable_gqa=shared
                )[:, :, :length].transpose(1, 2)
            )
    return torch.cat(outputs, 1).view(query.shape[0], query.shape[2], query.shape[1], -1), None


ALL_ATTENTION_FUNCTIONS.register(BY_DOCUMENT, attention_by_document)


@contextmanager
def documents_alone(model: nn.Module, batch: dict[str, torch.Tensor]) -> Iterator[None]:
    """Let ``model`` attend within the documents of ``batch``, in which positions begin at 0 with each."""
    if "position_ids" not in batch:
        yield
        return
    for module in model.modules():
        module.documents = batch["position_ids"].tolist()
    config = (model.get_base_model() if hasattr(model, "get_base_model") else model).config
    before, config._attn_implementation = config._attn_implementation, BY_DOCUMENT
    try:
        yield
    finally:
        config._attn_implementation = before


def round_half_away(master: torch.Tensor) -> torch.Tensor:
    """fp32 to bf16, ties away from zero: written differently from the engine's."""
    toward_zero = (master.view(torch.int32) & -65536).view(torch.float32)
    away = (master.view(torch.int32) & 0x8000) != 0
    step = (master.view(torch.int32) & -65536) + 65536
    return torch.where(away, step.view(torch.float32), toward_zero).to(torch.bfloat16)


class Twin:
    """Plain AdamW training of a model in memory."""

    def __init__(
        self, checkpoint: str, *, bf16: bool, lr: float, weight_decay: float, max_grad_norm: float | None,
        device: str = "cpu", eps: float = 1e-8, optimizer: str = "adamw",
    ):  # fmt: skip
        self.device, self.eps, self.optimizer = torch.device(device), eps, optimizer
        self.bf16, self.lr, self.weight_decay, self.max_grad_norm = bf16, lr, weight_decay, max_grad_norm
        dtype = torch.bfloat16 if bf16 else torch.float32
        masters = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
        self.masters = {name: p.detach().clone() for name, p in masters.named_parameters()}
        if bf16 and optimizer == "adamw8bit":
            self.masters = {name: in_24_bits(master) for name, master in self.masters.items()}
        self.model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=dtype).to(self.device).train()
        self.model.config.use_cache = False
        self._decayed = set(Trainer.get_decay_parameter_names(None, self.model))
        self._untie()
        self.moments = {name: (self._padded(p), self._padded(p)) for name, p in self.masters.items()}
        for moments in self.moments.values():
            for moment in moments:
                moment.zero_()
        self.steps = dict.fromkeys(self.masters, 0)
        """By parameter, as ``torch.optim.AdamW`` counts: steps in which it had a gradient."""
        self.grad_norm = 0.0
        self._load()

    def _untie(self) -> None:
        """Give the head its own parameter with the same values, so that its gradient can be told apart."""
        head, embedding = self.model.get_output_embeddings(), self.model.get_input_embeddings()
        self.tied = head.weight is embedding.weight
        if self.tied:
            head.weight = nn.Parameter(head.weight.detach().clone())
            self.head, self.embedding = head.weight, embedding.weight

    def _load(self) -> None:
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                if self.tied and parameter is self.head:
                    continue
                master = self.masters[name]
                parameter.copy_(round_half_away(master) if self.bf16 else master)
            if self.tied:
                self.head.copy_(self.embedding)

    @staticmethod
    def _padded(value: torch.Tensor) -> torch.Tensor:
        flat = value.detach().reshape(-1).float()
        padded = torch.zeros(-(-flat.numel() // LINE) * LINE)
        padded[: flat.numel()] = flat
        return padded

    def step(self, batch: dict[str, torch.Tensor], micro_batch: int) -> float:
        """One step; returns the loss."""
        targets = nn.functional.pad(batch["labels"], (0, 1), value=-100)[..., 1:]
        items = (targets != -100).sum()
        parts = [
            {name: value[start : start + micro_batch].to(self.device) for name, value in batch.items()}
            for start in range(0, len(batch["labels"]), micro_batch)
        ]
        sums: dict[str, list[torch.Tensor]] = {}
        loss = None
        for part in parts:
            with documents_alone(self.model, part):
                result = self.model(**part, num_items_in_batch=items, use_cache=False).loss
            result.backward()
            loss = result.detach() if loss is None else loss + result.detach()
            for name, parameter in self.model.named_parameters():
                if parameter.grad is not None:
                    sums.setdefault(name, []).append(parameter.grad.clone())
                parameter.grad = None
        gradients = {}
        head_name = next((n for n, p in self.model.named_parameters() if self.tied and p is self.head), None)
        for name, parameter in self.model.named_parameters():
            if name == head_name:
                continue
            terms = sums.get(name, [])
            if self.tied and parameter is self.embedding:
                terms = sums[head_name] + terms
            if not terms:
                continue
            if self.bf16 and len(terms) > 1:
                total = terms[0].float()
                for term in terms[1:]:
                    total += term.float()
                total = total.to(torch.bfloat16)
            else:
                total = terms[0]
                for term in terms[1:]:
                    total = total + term
            gradients[name] = total
        self.grad_norm = float(sum(g.double().square().sum() for g in gradients.values()).sqrt())
        scale = 1.0
        if self.max_grad_norm is not None and self.grad_norm > self.max_grad_norm:
            scale = self.max_grad_norm / (self.grad_norm + 1e-6)
        for name, gradient in gradients.items():
            gradient = gradient.cpu()
            master, wide = self._padded(self.masters[name]), self._padded(gradient)
            if scale != 1.0:
                wide.mul_(scale)
            self.steps[name] += 1
            self._update(name, master, wide, self.weight_decay if name in self._decayed else 0.0)
            self.masters[name] = master[: gradient.numel()].view(gradient.shape).clone()
        self._load()
        return float(loss)

    def _update(self, name: str, master: torch.Tensor, gradient: torch.Tensor, weight_decay: float) -> None:
        """One step of the optimizer over a parameter."""
        mean, variance = self.moments[name]
        if self.optimizer == "lion":  # algorithm 2 of the paper
            sign = torch.add(mean * 0.9, gradient, alpha=1 - 0.9).sign()
            master.mul_(1 - self.lr * weight_decay).sub_(sign, alpha=self.lr)
            mean.copy_(torch.add(mean * 0.99, gradient, alpha=1 - 0.99))
            return
        torch._fused_adamw_(
            [master], [gradient], [mean], [variance], [], [torch.tensor(float(self.steps[name]))],
            amsgrad=False, lr=self.lr, beta1=0.9, beta2=0.999, weight_decay=weight_decay, eps=self.eps, maximize=False,
        )  # fmt: skip
        if self.optimizer == "adamw8bit":
            for moment, signed in ((mean, True), (variance, False)):
                moment.copy_(in_8_bits(moment, signed))
            if self.bf16:
                master.copy_(in_24_bits(master))


def in_8_bits(values: torch.Tensor, signed: bool) -> torch.Tensor:
    """Moments as they are after having been kept in 8 bits, written out from FlashOptim (arXiv 2602.23349).

    Means by ``2x / (1 + |x|)``, variances by their roots; unlike there, no positive variance becomes 0.
    """
    blocks = values.view(-1, LINE)
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
