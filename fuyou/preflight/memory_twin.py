"""The small model as transformers trains it in memory, and the batches for both ways."""

import copy
import re
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

import numpy as np
import torch
from peft import PeftConfig, get_peft_model
from torch import nn
from transformers import PreTrainedConfig

from common.models.adapters.options import ALL_LINEAR
from common.models.meta_model import build_meta_model
from common.models.miniature import TOKENS, VOCABULARY
from common.models.task_type import TaskType, task_type_of
from common.randomness import own_random_numbers
from fuyou.layout.model_layout import ModelLayout
from fuyou.model.loss.cross_entropy import targets_of
from fuyou.preflight.claim import Claim, Gradients, config_parts, seeded

ROWS = 2


class MemoryTwin:
    """A small model with random weights, trained as transformers trains it.

    Raises:
        Exception: of any kind, if the family's code does not run with this configuration.
    """

    def __init__(self, claim: Claim, small: PreTrainedConfig):
        self._claim, self._small = claim, small
        self._plain = build_meta_model(small, dtype=claim.dtype)
        self.adapters = _fitting_adapters(claim.adapters, self._plain)
        """What the engine trains, where it is adapters."""
        self.trainable = claim.trainable and _fitting_names(claim.trainable, self._plain)
        """Names of what the engine trains, where it is a part."""
        self.model: nn.Module

    def build(self, layout: ModelLayout) -> None:
        """Build the model, of the engine's class, with its router loss and its trained parameters."""
        config = copy.deepcopy(self._plain.config)
        for part, asked in zip(config_parts(config), config_parts(self._small), strict=True):
            if hasattr(part, "output_router_logits"):
                part.output_router_logits = getattr(asked, "output_router_logits", False)
        with own_random_numbers(1):
            model: nn.Module = type(self._plain)._from_config(config, dtype=self._claim.dtype)
        if self.adapters is not None:  # a copy, as peft fills in what is left out; the engine names things as inside
            model = get_peft_model(model, copy.deepcopy(self.adapters)).get_submodule("base_model.model")  # type: ignore[arg-type]
        generator = torch.Generator().manual_seed(2)
        with torch.no_grad():
            for parameter in model.parameters():  # so that no path is idle because it begins with zeros
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.add_(noise, alpha=0.1 if parameter.dim() > 1 else 0.02)
        trained = {
            name
            for record in layout.records
            for slot in record.parameters
            if slot.name in record.trained_names
            for name in slot.names
        }
        for name, value in model.named_parameters(remove_duplicate=False):
            value.requires_grad_(name in trained)
        self.model = model

    def batch(self, number: int) -> dict[str, torch.Tensor]:
        """Return the batch of a step: ``ROWS`` rows of ``TOKENS`` tokens."""
        generator = torch.Generator().manual_seed(10 + number)
        most = getattr(self._small.get_text_config(decoder=True), "vocab_size", VOCABULARY)
        ordinary = (4, VOCABULARY // 2) if most >= VOCABULARY else (0, most)  # special tokens lie at the ends
        tokens = torch.randint(*ordinary, (ROWS, TOKENS), generator=generator)
        task_type = task_type_of(self._small)
        labels = tokens.clone()
        if not task_type.generates:
            shape = (ROWS,) if task_type is TaskType.SEQUENCE_CLASSIFICATION else (ROWS, TOKENS)
            labels = torch.randint(0, self._small.num_labels or 2, shape, generator=generator)
        batch = {"input_ids": tokens, "labels": labels}
        if self._claim.packed:
            documents = self._documents()
            for piece in documents:
                labels[:, piece.start] = -100
            positions = torch.cat([torch.arange(piece.stop - piece.start) for piece in documents])
            batch["position_ids"] = positions.expand(ROWS, -1).contiguous()
        return batch

    def _documents(self) -> list[slice]:
        middle = TOKENS // 2 + 1
        return [slice(0, middle), slice(middle, TOKENS)] if self._claim.packed else [slice(None)]

    def run(self, batch: Mapping[str, torch.Tensor], shifts_labels: bool) -> Gradients:
        """Run a forward and a backward pass, separately for each document where rows hold several.

        Raises:
            ArithmeticError: if the loss is not finite.
            Exception: of any kind, if the family's code does not run with this batch.
        """
        parts = [
            {name: batch[name][..., piece].contiguous() for name in ("input_ids", "labels")}
            for piece in self._documents()
        ]
        counts = [int((targets_of(part["labels"], shifts_labels) != -100).sum()) for part in parts]
        self.model.zero_grad(set_to_none=True)
        total = 0.0
        for part, count in zip(parts, counts, strict=True):
            loss = self.model(**part, use_cache=False).loss * (count / sum(counts))
            loss.backward()
            total += float(loss)
        if not np.isfinite(total):
            raise ArithmeticError(f"its loss is {total}")
        return Gradients(
            total, {name: parameter.grad for name, parameter in self.model.named_parameters(remove_duplicate=False)}
        )

    def repeats(self, batch: Mapping[str, torch.Tensor]) -> bool:
        """Return whether the loss of a batch does not depend on random numbers."""
        losses = []
        for seed in (2, 3):
            with seeded(seed), torch.no_grad():
                losses.append(float(self.model(**batch, use_cache=False).loss))
        return losses[0] == losses[1]


def _fitting_names(patterns: Sequence[str], plain: nn.Module) -> list[str]:
    names = [name for name, _ in plain.named_parameters()]
    return [pattern for pattern in patterns if any(fnmatchcase(name, pattern) for name in names)] or names


def _fitting_adapters(adapters: PeftConfig | None, plain: nn.Module) -> PeftConfig | None:
    """Return the adapters for modules that exist in fewer layers; on all linear layers if none do."""
    adapters = copy.deepcopy(adapters)
    if adapters is None:
        return None
    for field in ("layers_to_transform", "layers_pattern"):
        if getattr(adapters, field, None) is not None:
            setattr(adapters, field, None)
    if rows := getattr(adapters, "trainable_token_indices", None):
        few = {name: _few_rows(given) for name, given in rows.items()} if isinstance(rows, dict) else _few_rows(rows)
        adapters.trainable_token_indices = few  # type: ignore[attr-defined]
    targets = getattr(adapters, "target_modules", None)
    named = [name for name, _ in plain.named_modules()]
    if isinstance(targets, str) and targets != ALL_LINEAR:
        fits = any(re.fullmatch(targets, name) for name in named)
    else:
        ends = [targets] if isinstance(targets, str) else list(targets or ())
        fits = (
            ALL_LINEAR in ends
            or not ends
            or any(name == end or name.endswith(f".{end}") for name in named for end in ends)
        )
    if not fits and not getattr(adapters, "target_parameters", None):
        adapters.target_modules = ALL_LINEAR  # type: ignore[attr-defined]
    return adapters


def _few_rows(tokens: Sequence[int]) -> list[int]:
    """Return tokens of the small vocabulary, the same for the same ``tokens``."""
    return sorted({token % 16 for token in tokens})
