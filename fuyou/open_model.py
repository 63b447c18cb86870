"""The model that is going to be trained: its parts, its records, and where their values come from. No bytes yet."""

from collections.abc import Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path

import torch
from peft import PeftConfig
from transformers import PreTrainedConfig

from common.errors import UserError, did_you_mean
from common.models.adapters import Adapters
from common.models.meta import build_meta_model
from common.models.sources import CheckpointSource, RandomSource, WeightSource
from fuyou.frozen import FrozenDtype
from fuyou.model_records import fingerprint, model_records
from fuyou.records import Precision
from fuyou.router_loss import find_router_loss, wants_router_loss
from fuyou.stack import StreamedModel


class OpenModel:
    """A model without its weights.

    Args:
        config: of the model.
        precision: of what is trained; frozen weights have its dtype.
        device: where blocks compute.
        adapters: to train these and freeze everything else.
        trainable: to train the parameters with these names only; ``*`` stands for anything.
        frozen: how the blocks' frozen matrices are kept.
        seed: of the adapters' first values and of random weights.
        router_loss: whether a mixture of experts' router loss is a part of the loss, see :mod:`fuyou.router_loss`.

    Attributes:
        base: the model as it was, for its names: without adapters, it is the one that ``stack`` runs.
        stack: its parts.
        shape: its records.
        adapters: None if there are none.
        router_loss: None if that is none.

    Raises:
        UserError: the model cannot be streamed, or adapted, or no parameter has such a name.
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        precision: Precision,
        device: torch.device,
        adapters: PeftConfig | None = None,
        trainable: Sequence[str] | None = None,
        frozen: FrozenDtype = FrozenDtype.PLAIN,
        seed: int = 0,
        router_loss: str = "auto",
    ):
        if adapters is not None and trainable is not None:
            raise UserError("adapters freeze all other parameters: give either adapters or trainable.")
        self.config, self._seed = config, seed
        model = self.base = build_meta_model(config, dtype=precision.dtype)
        self.adapters: Adapters | None = None
        if adapters is not None:
            model = build_meta_model(config, dtype=precision.dtype)
            self.adapters = Adapters(model, adapters, seed)
        elif trainable is not None:
            self._freeze_all_but(trainable)
        wanted = wants_router_loss(model, router_loss)
        self.stack = StreamedModel(model, device)
        self.router_loss = find_router_loss(self.stack, router_loss) if wanted else None
        experts = 0 if self.router_loss is None else self.router_loss.experts
        self.shape = replace(model_records(self.stack, precision, frozen), router_experts=experts)

    def weights(self, checkpoint: Path | None) -> WeightSource:
        """Where first values come from; checked, and the model's buffers filled from it.

        Args:
            checkpoint: None for random weights.

        Raises:
            UserError, FinetuneError: see :meth:`WeightSource.check`.
        """
        source: WeightSource = (
            CheckpointSource(checkpoint, self.base) if checkpoint is not None else RandomSource(self.base, self._seed)
        )
        source.check()
        for name, value in source.read_buffers():
            self.base.get_buffer(name).copy_(value)
            if self.adapters is not None:
                self.stack.model.get_buffer(name).copy_(value)
        return source if self.adapters is None else self.adapters.source(source)

    @property
    def fingerprint(self) -> str:
        """Tells apart models whose stores are not interchangeable."""
        adapted = None
        if self.adapters is not None:  # scaling and dropout are part of the computation, and of no record
            settings = self.adapters.config.to_dict()
            adapted = {name: _same_text(settings[name]) for name in sorted(settings) if name not in _NOT_COMPUTED}
        return fingerprint(self.shape.records, adapted)

    @property
    def parameters(self) -> int:
        """Of the model and its adapters."""
        return sum(record.parameter_count for record in self.shape.records)

    @property
    def trainable_parameters(self) -> int:
        return sum(self.shape.records[index].parameter_count for index in self.shape.trainable)

    def _freeze_all_but(self, patterns: Sequence[str]) -> None:
        found = set()
        for name, parameter in self.base.named_parameters():
            matching = {pattern for pattern in patterns if fnmatchcase(name, pattern)}
            parameter.requires_grad_(bool(matching))
            found |= matching
        for pattern in patterns:
            if pattern not in found:
                names = [name for name, _ in self.base.named_parameters()]
                raise UserError(f"trainable: no parameter is called {pattern!r}.{did_you_mean(pattern, names)}")


#: Settings of an adapter that say nothing about what it computes.
_NOT_COMPUTED = {"base_model_name_or_path", "revision", "inference_mode", "peft_version", "auto_mapping", "task_type"}


def _same_text(value: object) -> str:
    """In every process: peft keeps names in sets, whose order another process does not share."""
    return str(sorted(value, key=str) if isinstance(value, (set, frozenset)) else value)
