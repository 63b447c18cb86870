"""What batches and loss depend on in a model family, tried out on a small model of the same configuration."""

import contextlib
import inspect
from functools import cached_property

import torch
from torch import nn
from torch.nn import functional
from transformers import PreTrainedConfig, PreTrainedModel

from common.errors import UserError
from common.models.attention.isolation import Isolation, find_isolation
from common.models.miniature import miniature, on_one_thread
from common.models.task_type import TaskType, task_type_of
from common.randomness import own_random_numbers
from fuyou.model.loss.cross_entropy import IGNORED, targets_of

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
    """

    def __init__(self, kind: type[PreTrainedModel], config: PreTrainedConfig):
        self._kind = kind
        self._config = config

    @cached_property
    def isolation(self) -> Isolation | None:
        """Way to keep documents apart that share a row; None if each document has its own row."""
        if self._small_model is None:  # no proof
            return None
        with own_random_numbers(), on_one_thread():
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
        with own_random_numbers(), on_one_thread():
            if getattr(self._config, "is_decoder", True) is False and sees_later_tokens(self._small_model):
                raise UserError(
                    f"{self._kind.__name__} sees whole texts, and with them each token that it would learn to predict: "
                    'write "is_decoder": true in its config.json to train it on the next token.'
                )
            return shifts_labels(self._small_model)

    @cached_property
    def _small_model(self) -> PreTrainedModel | None:
        try:
            return small_model(self._kind, self._config)
        except Exception:  # each family checks its own fields in its own way
            return None

    def check_documents(self, masked: bool) -> None:
        """Refuse rows of several documents if these would see each other, or are ``masked`` for padding, too."""
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
    """Build a small model of the same structure, with values that make every part of it matter, fp32 on the CPU."""
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


def sees_later_tokens(model: PreTrainedModel) -> bool:
    """Return whether the logits of a token depend on the tokens after it."""
    was_training = model.training
    first = torch.arange(4, 12).remainder(model.config.get_text_config().vocab_size)[None]
    second = first.clone()
    second[:, -1] = 1
    try:
        with torch.no_grad():
            left, right = (
                model.eval()(input_ids=ids, use_cache=False).logits[:, :-1] for ids in (first, second)
            )
    finally:
        model.train(was_training)
    return not torch.allclose(left, right, rtol=_ROUNDING, atol=_ROUNDING)


_ROUNDING = 1e-4  # Part of a loss up to which another counts as equal


def shifts_labels(model: PreTrainedModel) -> bool:
    """Return whether the model's own loss compares each logit with the *next* label, as most causal models do.

    Some decoders (BART's kind) compare it with the label at its own place, and leave it to the data to put the next
    token there.

    Raises:
        UserError: its loss is not the mean cross entropy, neither with shifted labels nor without.
    """
    if "labels" not in inspect.signature(model.forward).parameters:
        return True  # it has no loss
    vocabulary = model.config.get_text_config().vocab_size
    generator = torch.Generator().manual_seed(11)
    ids = torch.randint(min(5, vocabulary // 2), vocabulary, (2, 13), generator=generator)
    labels = ids.clone()
    labels[0, :4] = labels[1, 5:7] = IGNORED
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            try:
                output = model(input_ids=ids, labels=labels, use_cache=False)
            except Exception:
                # Some families' code for inference does not run where that for training does (xLSTM's)
                output = model.train()(input_ids=ids, labels=labels, use_cache=False)
    finally:
        model.train(was_training)
    if output.loss is None:
        return True
    loss = float(output.loss)
    rows = output.logits.float().flatten(0, -2)
    losses = {
        shifted: float(
            functional.cross_entropy(rows, targets_of(labels, shifted).flatten(), ignore_index=IGNORED)
        )
        for shifted in (True, False)
    }
    for shifted, value in losses.items():
        if abs(loss - value) <= _ROUNDING * abs(loss):
            return shifted
    raise UserError(
        f"The loss of {type(model).__name__} is not the mean cross entropy of its logits and labels: on a small model "
        f"of this configuration its own code gives {loss:.6g}, and the cross entropy is {losses[True]:.6g} (with "
        f"labels of the next position) or {losses[False]:.6g} (of the same). Training computes nothing else, so this "
        "model cannot be trained here."
    )
