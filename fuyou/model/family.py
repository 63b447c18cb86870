"""What batches and loss depend on in a model family, tried out on a small model of the same configuration."""

import contextlib
from functools import cached_property

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from common.errors import UserError
from common.models.attention.isolation import Isolation, find_isolation
from common.models.label_shift import shifts_labels
from common.models.miniature import miniature
from common.models.task_type import TaskType, task_type_of
from common.randomness import own_random_numbers

_known: dict[tuple[type, str], "Family"] = {}


def family_of(model: PreTrainedModel) -> "Family":
    """Return the family of ``model``, which may be on the meta device and have adapters; equal models share one."""
    key = type(model), model.config.to_json_string(use_diff=False)
    if key not in _known:
        _known[key] = Family(type(model), model.config)
    return _known[key]


class Family:
    """A model family: how its batches are made and its loss is computed.

    Each answer takes up to a few seconds, once.

    Args:
        kind: class of the model.
        config: its configuration.
    """

    def __init__(self, kind: type[PreTrainedModel], config: PreTrainedConfig):
        self._kind, self._config = kind, config

    @cached_property
    def isolation(self) -> Isolation | None:
        """Way to keep documents apart that share a row; None if each document has its own row."""
        if self._small_model is None:  # no proof
            return None
        with own_random_numbers():
            return find_isolation(self._small_model)

    @cached_property
    def shifts_labels(self) -> bool:
        """Whether each position is compared with the label of the next one; if not, with its own.

        Raises:
            UserError: the family computes another loss than those that are computed here.
        """
        if task_type_of(self._config) in (TaskType.SEQUENCE_CLASSIFICATION, TaskType.TOKEN_CLASSIFICATION):
            return False
        if self._small_model is None:
            return True
        with own_random_numbers():
            return shifts_labels(self._small_model)

    @cached_property
    def _small_model(self) -> PreTrainedModel | None:
        try:
            return small_model(self._kind, self._config)
        except Exception:  # each family checks its own fields in its own way
            return None

    def check_documents(self, masked: bool) -> None:
        """Refuse rows of several documents if these would see each other.

        Args:
            masked: whether there is a mask of padding, too.

        Raises:
            UserError: they would.
        """
        if masked:
            raise UserError(
                "position_ids restart within a row, and an attention_mask of padding is given: packed rows need none, "
                "as padding comes last or is a separate document. Leave attention_mask out."
            )
        if self.isolation is None:
            raise UserError(
                "position_ids restart within a row, and nothing keeps the documents of a row apart in "
                f"{self._kind.__name__}: they would see each other. Give every document a separate row."
            )


def small_model(kind: type[PreTrainedModel], config: PreTrainedConfig) -> PreTrainedModel:
    """Build a small model of the same structure, with values that make every part of it matter, fp32 on the CPU.

    Raises:
        Exception: the family cannot be shrunk; any type of exception.
    """
    small = miniature(config)
    for part in (small, small.get_text_config()):
        with contextlib.suppress(AttributeError):
            part.use_cache = part.output_router_logits = False
    with own_random_numbers(0):
        model = kind._from_config(small, dtype=torch.float32)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() > 1:
                    nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
                else:
                    parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model
