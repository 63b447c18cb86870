"""A model without its weights, and what of it is trained: adapters, parameters that are named, or all but towers."""

from collections.abc import Sequence
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path

import torch
from peft import PeftConfig
from torch import nn
from transformers import PreTrainedConfig

from common.errors import UserError, did_you_mean
from common.models.adapters.adapters import Adapters
from common.models.adapters.options import SavedAdapter
from common.models.adapters.towers import adapt_towers
from common.models.checkpoint.sources import CheckpointSource
from common.models.meta_model import build_meta_model
from common.models.task_type import task_type_of
from common.models.vision import DEFAULT_FREEZING, TowerFreezing

_NEVER_TRAINED = 1e-16  # Largest value in the row of a token that a model was not trained on


class AdaptedModel:
    """A model on the meta device, in which ``requires_grad`` says what is trained.

    Args:
        config: configuration of the model.
        dtype: dtype that its weights compute in.
        adapters: adapters that are trained, while everything else is frozen; filled in as ``peft`` does.
        trainable: names of the only parameters that are trained; ``*`` matches any text.
        seed: seed of the adapters' first values.
        checkpoint: where weights come from; None for random ones. A model that cannot have these weights is refused.
        towers: what of a vision-language model's towers is frozen, if ``trainable`` does not say it.
        draw: whether adapters' first values are needed; see :class:`Adapters`.
        saved: adapters of the configuration ``adapters`` to begin with.

    Attributes:
        base: the model without adapters, for its names; without adapters, the same as ``model``.
        model: the model that computes.
        adapters: its adapters, or None.
        task_type: task that the model's head is for.

    Raises:
        UserError: there is no such model, it cannot be adapted, or no parameter has such a name.
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        dtype: torch.dtype,
        adapters: PeftConfig | None = None,
        trainable: Sequence[str] | None = None,
        seed: int = 0,
        checkpoint: Path | None = None,
        towers: TowerFreezing = DEFAULT_FREEZING,
        draw: bool = True,
        saved: SavedAdapter | None = None,
    ):
        if adapters is not None and trainable is not None:
            raise UserError("adapters freeze all other parameters: give either adapters or trainable.")
        self.config = config
        self.checkpoint = checkpoint
        self.task_type = task_type_of(config)
        self.model = self.base = build_meta_model(config, dtype=dtype, checkpoint=checkpoint)
        self.adapters: Adapters | None = None
        if adapters is not None:
            self.model = build_meta_model(config, dtype=dtype)
            if saved is None:  # whose configuration says what it adapts
                adapt_towers(self.model, adapters, towers)
            self.adapters = Adapters(self.model, adapters, seed, draw, saved)
        elif trainable is not None:
            self._freeze_all_but(trainable)
        else:
            for name in towers.frozen(self.base):
                self.base.get_parameter(name).requires_grad_(False)

    @cached_property
    def source(self) -> CheckpointSource | None:
        """Checkpoint that its weights come from, with its headers read and nothing checked; None: they are random."""
        return None if self.checkpoint is None else CheckpointSource(self.checkpoint, self.base)

    def unknown_tokens(self, tokens: Sequence[int]) -> list[int]:
        """Return those tokens whose rows in the embeddings or the head are 0, if the head is not trained."""
        head = self.model.get_output_embeddings()
        source = self.source
        if (
            self.adapters is None
            or source is None
            or not isinstance(head, nn.Linear)
            or head.weight.requires_grad
        ):
            return []
        layers = [
            head,
            *(layer for layer in (self.model.get_input_embeddings(),) if isinstance(layer, nn.Embedding)),
        ]
        names = {id(parameter): name for name, parameter in self.model.named_parameters()}
        read = [
            name
            for layer in layers
            if source.reads_rows(name := self.adapters.base_names[names[id(layer.weight)]])
        ]
        return [
            token
            for token in tokens
            if any(
                float(source.read_rows(name, token, token + 1).abs().max()) <= _NEVER_TRAINED for name in read
            )
        ]

    @property
    def frozen_heads(self) -> list[str]:
        """Names of the modules behind the language model in which nothing is trained, sorted."""
        inside = f"{self.base.base_model_prefix}."
        heads = {name for name, _ in self.base.named_parameters() if not name.startswith(inside)}
        trained = {name for name, parameter in self.model.named_parameters() if parameter.requires_grad}
        first, second = ({name.partition(".")[0] for name in names} for names in (heads, trained))
        return sorted(first - second)

    @property
    def parameters(self) -> int:
        """Number of the model's parameters, without adapters."""
        return sum(parameter.numel() for parameter in self.base.parameters())

    @property
    def trained_parameters(self) -> int:
        """Number of the parameters that are trained."""
        if self.adapters is not None:
            return self.adapters.trained_count
        return sum(parameter.numel() for parameter in self.base.parameters() if parameter.requires_grad)

    def _freeze_all_but(self, patterns: Sequence[str]) -> None:
        parameters = dict(self.base.named_parameters())
        for pattern in patterns:
            if not any(fnmatchcase(name, pattern) for name in parameters):
                raise UserError(
                    f"trainable: no parameter is called {pattern!r}.{did_you_mean(pattern, parameters)}"
                )
        for name, parameter in parameters.items():
            parameter.requires_grad_(any(fnmatchcase(name, pattern) for pattern in patterns))
