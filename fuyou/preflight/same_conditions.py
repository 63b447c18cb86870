"""The same conditions for two small models that are compared: random numbers, buffers, no dropout, and silence."""

import contextlib
import random
import warnings
from collections.abc import Iterator

import numpy as np
import transformers
from torch import nn

from common.randomness import own_random_numbers


def switch_off_dropout(model: nn.Module) -> None:
    """Switch dropout off in a model that is training: in evaluation, some families run other code."""
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
        for holder in (module, getattr(module, "config", None)):
            for name, value in list(vars(holder).items()) if holder is not None else ():
                if "drop" in name and isinstance(value, float):
                    setattr(holder, name, 0.0)


def copy_buffers(source: nn.Module, target: nn.Module) -> None:
    """Give ``target`` the buffers of ``source``, which some families draw at random."""
    theirs = dict(source.named_buffers())
    for name, buffer in target.named_buffers():
        if name in theirs and theirs[name].shape == buffer.shape:
            buffer.copy_(theirs[name])


@contextlib.contextmanager
def seeded(number: int) -> Iterator[None]:
    """Draw the same random numbers each time, whoever draws them, and leave the caller's as they were."""
    python, numpy = random.getstate(), np.random.get_state()  # noqa: NPY002
    try:
        with own_random_numbers(number):
            random.seed(number)
            np.random.seed(number)  # noqa: NPY002  # what a family's own code draws from
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)  # noqa: NPY002


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Silence what families say about small configurations."""
    verbosity = transformers.logging.get_verbosity()
    try:
        transformers.logging.set_verbosity_error()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        transformers.logging.set_verbosity(verbosity)
