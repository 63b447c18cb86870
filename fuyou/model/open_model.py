"""The model to train, without weights: its parts, its records, the source of their values, and its reference."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from peft import PeftConfig
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import nn
from transformers import PreTrainedConfig

from common.errors import UserError
from common.models.adapters.adapted_model import AdaptedModel
from common.models.adapters.options import WITHOUT_EFFECT
from common.models.checkpoint.compressed.formats import method_of
from common.models.checkpoint.compressed.parameters import CompressedParameter
from common.models.checkpoint.random_source import RandomSource
from common.models.checkpoint.sources import WeightSource
from common.models.structure import fp32_parameters
from fuyou.layout.frozen_weights import FrozenDtype
from fuyou.layout.model_layout import ModelLayout
from fuyou.layout.record import Precision
from fuyou.model.loss.router_loss import find_router_loss
from fuyou.model.model_records import fingerprint, model_records
from fuyou.model.streamed_model import StreamedModel


def positions_in(table: nn.Embedding) -> int:
    """Return the positions in a learned table; some families have it begin with others."""
    return table.num_embeddings - int(getattr(table, "offset", 0))


class OpenModel(AdaptedModel):
    """A model without its weights, in parts that are computed one after the other, and the records that hold them.

    Args:
        config: configuration of the model.
        precision: dtypes of what is trained; frozen weights have the same dtype.
        device: where blocks compute.
        adapters: adapters that are trained, while everything else is frozen.
        trainable: names of the only parameters that are trained; ``*`` matches any text.
        frozen: how frozen matrices are stored; None: as in the checkpoint, if that is compressed.
        seed: seed of the adapters' first values and of random weights.
        router_loss: whether a mixture of experts' router loss is a part of the loss
            (:mod:`fuyou.model.loss.router_loss`).
        checkpoint: where weights come from; None for random ones. Here it is opened only if it is compressed and
            something is frozen, for then the records depend on what is in it.
        images: whether batches come with images.
        options: towers, draw, and saved, as of :class:`AdaptedModel`.

    Attributes:
        stack: the model, in parts.
        layout: its records.
        router_loss: its router loss, or None.

    Raises:
        UserError: the model cannot be streamed, or adapted, or no parameter has such a name; or frozen weights are to
            be kept in the bytes of a checkpoint that is not compressed.
        FinetuneError: as :class:`CheckpointSource`, if the checkpoint is opened.
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        precision: Precision,
        device: torch.device,
        adapters: PeftConfig | None = None,
        trainable: Sequence[str] | None = None,
        frozen: FrozenDtype | None = FrozenDtype.PLAIN,
        seed: int = 0,
        router_loss: str = "auto",
        checkpoint: Path | None = None,
        images: bool = False,
        **options: Any,
    ):
        super().__init__(config, precision.dtype, adapters, trainable, seed, checkpoint, **options)
        self._seed = seed
        self.router_loss = find_router_loss(self.model, router_loss)
        self.stack = StreamedModel(self.model, device)
        experts = 0 if self.router_loss is None else self.router_loss.experts
        compressed = self._compressed(frozen, precision.dtype)
        if frozen is None:
            frozen = FrozenDtype.CHECKPOINT if compressed else FrozenDtype.PLAIN
        records = model_records(self.stack, precision, frozen, compressed, self._kept_in_fp32())
        self.layout = replace(records, router_experts=experts, images=images)

    def _kept_in_fp32(self) -> set[str]:
        """Return the names now of the parameters that the family keeps in fp32."""
        names = set(fp32_parameters(self.base))
        if self.adapters is None:
            return names
        return {name for name, before in self.adapters.base_names.items() if before in names}

    @cached_property
    def learned_positions(self) -> nn.Embedding | None:
        """The learned table of positions of the text, or None."""
        length = getattr(self.config.get_text_config(), "max_position_embeddings", None)
        for name, module in self.stack.model.named_modules():
            is_table = name.endswith(("position_embeddings", "embed_positions", "wpe"))
            if is_table and isinstance(module, nn.Embedding) and positions_in(module) == length:
                # Not that of images
                return module
        return None

    @cached_property
    def weights(self) -> WeightSource:
        """Source of the first values, after checking it and filling the model's buffers from it."""
        source: WeightSource = self.source or RandomSource(self.base, self._seed)
        source.check()
        for name, value in source.read_buffers():
            self.base.get_buffer(name).copy_(value)
            if self.stack.model is not self.base:
                now = name if self.adapters is None else self.adapters.buffer_names[name]
                self.stack.model.get_buffer(now).copy_(value)
        if self.adapters is None:
            return source
        self.adapters.check_saved(source)
        return self.adapters.source(source)

    @property
    def fingerprint(self) -> str:
        """Hash that differs between models whose stores are not interchangeable."""
        adapted = None
        if self.adapters is not None:  # scaling and dropout are part of the computation, and of no record
            settings = self.adapters.config.to_dict()
            adapted = {
                name: same_text(settings[name]) for name in sorted(settings) if name not in WITHOUT_EFFECT
            }
        return fingerprint(self.layout.records, adapted)

    def _compressed(self, frozen: FrozenDtype | None, dtype: torch.dtype) -> dict[str, CompressedParameter]:
        names = [
            name for name, parameter in self.stack.model.named_parameters() if not parameter.requires_grad
        ]
        if not names or frozen not in (None, FrozenDtype.CHECKPOINT):
            return {}
        compressed: dict[str, CompressedParameter] = {}
        if self.checkpoint is not None and method_of(self.checkpoint) is not None:
            source = self.source
            assert source is not None
            before = self.adapters.base_names if self.adapters is not None else {}
            for name in names:
                parameter = source.compressed(before.get(name, name))
                if parameter is not None and parameter.is_smaller_than(dtype):
                    compressed[name] = parameter
        if frozen is FrozenDtype.CHECKPOINT and not compressed:
            where = (
                "random weights have none"
                if self.checkpoint is None
                else f"{self.checkpoint} is not compressed"
            )
            raise UserError(
                f"--frozen-dtype checkpoint keeps frozen weights in the bytes of a compressed checkpoint, and {where}: "
                "leave it out."
            )
        return compressed


def same_text(value: object) -> str:
    """Return ``value`` as text that is equal in every process: peft keeps names in sets, whose order differs."""
    return str(sorted(value, key=str) if isinstance(value, (set, frozenset)) else value)


def adapters_off(modules: Iterable[nn.Module]) -> AbstractContextManager[None]:
    """Let those of ``modules`` that have adapters compute without them while the context is open."""
    kinds = BaseTunerLayer | AuxiliaryTrainingWrapper
    # Not by enable_adapters, which changes requires_grad, too.
    return _switched([module for module in modules if isinstance(module, kinds)], "_disable_adapters", True)


def evaluating(modules: Iterable[nn.Module]) -> AbstractContextManager[None]:
    """Let ``modules`` compute as in evaluation (no dropout) while the context is open."""
    return _switched(modules, "training", False)


@contextmanager
def _switched(modules: Iterable[nn.Module], name: str, value: bool) -> Iterator[None]:
    switched = [module for module in modules if getattr(module, name) is not value]
    for module in switched:
        setattr(module, name, value)
    try:
        yield
    finally:
        for module in switched:
            setattr(module, name, not value)


def check_whole_blocks(layout: ModelLayout) -> None:
    """Check that blocks are not in pieces, through which no reference can pass."""
    if layout.orders:
        raise UserError(
            "Blocks of this model are computed in pieces, through which no reference passes yet: give more memory, or "
            "compute the reference's log-probabilities before training and give them to the loss."
        )


def check_reference(model: OpenModel) -> None:
    """Check that the model without its adapters is the one that training began with, and can be computed."""
    why: str | None = "this run trains the weights themselves"
    if model.adapters is not None:
        names = model.adapters.base_names
        trained = [names[name] for name in model.adapters.trainable_names if name in names]
        why = f"next to adapters, {trained[0]} is trained itself" if trained else None
    if why is not None:
        raise UserError(
            f"The reference is the model without its adapters, and {why}, so its original weights are gone: train "
            "adapters alone, or compute the reference's log-probabilities before training and give them to the loss."
        )
    check_whole_blocks(model.layout)
