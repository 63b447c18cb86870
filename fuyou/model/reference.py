"""The model without its adapters: the one that training began with, as a reference for what is trained."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import nn

from common.errors import UserError
from fuyou.layout.model_layout import ModelLayout
from fuyou.model.open_model import OpenModel


@contextmanager
def adapters_off(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Let those of ``modules`` that have adapters compute without them while the context is open."""
    kinds = BaseTunerLayer | AuxiliaryTrainingWrapper
    adapted: Iterator[Any] = (one for one in modules if isinstance(one, kinds))
    switched = [one for one in adapted if not one._disable_adapters]
    # Not by enable_adapters, which changes requires_grad, too.
    for one in switched:
        one._disable_adapters = True
    try:
        yield
    finally:
        for one in switched:
            one._disable_adapters = False


@contextmanager
def evaluating(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Let ``modules`` compute as in evaluation (no dropout) while the context is open."""
    switched = [one for one in modules if one.training]
    for one in switched:
        one.training = False
    try:
        yield
    finally:
        for one in switched:
            one.training = True


def check_whole_blocks(shape: ModelLayout) -> None:
    """See whether a reference can pass through the blocks, whoever it is.

    Raises:
        UserError: they are in pieces.
    """
    if shape.orders:
        raise UserError(
            "Blocks of this model are computed in pieces, through which no reference passes yet: give more memory, or "
            "compute the reference's log-probabilities before training and give them to the loss."
        )


def check_reference(model: OpenModel) -> None:
    """See whether the model without its adapters is the one that training began with, and can be computed.

    Raises:
        UserError: it is not, or cannot.
    """
    _check_frozen(model)
    check_whole_blocks(model.shape)


def _check_frozen(model: OpenModel) -> None:
    adapters, why = model.adapters, "this run trains the weights themselves"
    if adapters is not None:
        trained = next((name for name in adapters.trainable_names if name in adapters.base_names), None)
        if trained is None:
            return
        why = f"beside adapters, {adapters.base_names[trained]} is trained itself"
    raise UserError(
        f"A reference is the model without its adapters, and {why}, so that nothing of what they were is left: train "
        "adapters alone, or compute the reference's log-probabilities before training and give them to the loss."
    )
