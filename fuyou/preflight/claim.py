"""What a proof depends on, equal conditions for both sides, and their comparison."""

import contextlib
import hashlib
import json
import random
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from peft import PeftConfig
from torch import nn
from transformers import PreTrainedConfig

from common.models.miniature import miniature
from common.randomness import own_random_numbers
from fuyou.model.open_model import same_text


@dataclass(frozen=True)
class Claim:
    """A statement to prove.

    Args:
        trainable: names of the trained parameters, if not all.
        packed: whether rows hold several documents, with position ids that restart.
        router_loss: ``"on"``, ``"off"``, or ``"auto"``, which leaves it to the configuration.
        pieces: whether blocks are cut into the smallest pieces.
        chunks: whether rows pass in chunks of tokens.
    """

    config: PreTrainedConfig
    adapters: PeftConfig | None = None
    trainable: tuple[str, ...] | None = None
    packed: bool = False
    router_loss: str = "auto"
    dtype: torch.dtype = torch.float32
    pieces: bool = False
    chunks: bool = False

    def small_config(self) -> PreTrainedConfig:
        """Return the small configuration, with the requested router loss."""
        small = miniature(self.config)
        if small.num_labels == 1:  # a reward: its head is that of classes, and its loss is the caller's
            small.num_labels = 2
        if self.router_loss != "auto":
            for part in config_parts(small):
                if hasattr(part, "output_router_logits"):
                    part.output_router_logits = self.router_loss == "on"
        return small

    def key(self, small: PreTrainedConfig) -> dict[str, Any]:
        """Return everything that the proof depends on, as JSON."""
        fields = {name: value for name, value in small.to_dict().items() if name not in ("_name_or_path",)}
        adapters = None if self.adapters is None else self.adapters.to_dict()
        settled: dict[str, Any] = {
            "config": fields,
            "adapters": adapters,
            "trainable": self.trainable,
            "packed": self.packed,
            "router_loss": self.router_loss,
            "dtype": str(self.dtype),
            **{name: True for name in ("pieces", "chunks") if getattr(self, name)},
        }
        return {
            "claim": json.loads(json.dumps(settled, sort_keys=True, default=same_text)),
            "versions": {name: metadata.version(name) for name in ("torch", "transformers", "peft")},
            "code": own_code(),
        }


def config_parts(config: PreTrainedConfig) -> tuple[PreTrainedConfig, PreTrainedConfig]:
    """Return a configuration and that of its language model, which may be the same."""
    return config, config.get_text_config(decoder=True)


@cache
def own_code() -> str:
    """Return a digest of the code that the proof is about."""
    root, digest = Path(__file__).parents[2], hashlib.sha256()
    for folder in ("fuyou", "common/models", "common/data"):
        for file in sorted((root / folder).rglob("*.py")):
            digest.update(file.read_bytes())
    return digest.hexdigest()[:24]


@dataclass(frozen=True)
class Gradients:
    """A loss, and gradients by every name of each parameter; None if there is none."""

    loss: float
    by_name: Mapping[str, torch.Tensor | None]


@dataclass(frozen=True)
class Tolerance:
    """Largest differences that rounding may cause."""

    # Of a tensor's gradient, relative to its largest element (or a hundredth of the whole gradient's). What is lost or
    # wrong is larger by orders of magnitude.
    gradient: float
    loss: float  # Relative


ORDER_OF_SUMS = Tolerance(1e-4, 2e-6)  # The same operators, gradients summed in another order in fp32
DOCUMENTS_APART = Tolerance(2e-3, 2e-5)  # Documents of packed rows, and each of them computed alone
NARROW = Tolerance(0.05, 2e-6)  # bf16, where a sum over a tied parameter's two places is rounded once more


def first_difference(expected: Gradients, actual: Gradients, tolerance: Tolerance) -> str | None:
    """Return the first difference beyond ``tolerance``, as text; None if there is none."""
    if not abs(actual.loss - expected.loss) <= tolerance.loss * max(1.0, abs(expected.loss)):
        return f"the loss is {actual.loss:.6f}, and {expected.loss:.6f} in memory"
    there = [value for value in expected.by_name.values() if value is not None]
    least = 0.01 * max((float(value.abs().max()) for value in there), default=0.0)
    wrong = []
    for name, gradient in actual.by_name.items():
        how = _deviation(expected.by_name[name], gradient, least, tolerance.gradient)
        if how is not None:
            wrong.append(f"the gradient of {name} is {how}")
    if not wrong:
        return None
    return f"{wrong[0]} (the first of {len(wrong)} of {len(actual.by_name)} tensors)"


def _deviation(
    expected: torch.Tensor | None, actual: torch.Tensor | None, least: float, tolerance: float
) -> str | None:
    if expected is None and actual is None:
        return None
    if actual is None:
        return "there in memory only" if float(expected.abs().max()) > 0 else None  # type: ignore[union-attr]
    if expected is None:
        return "not there in memory" if float(actual.abs().max()) > 0 else None
    scale = max(float(expected.abs().max()), least)
    difference = float((actual.float() - expected.float()).abs().max()) / scale
    return None if difference <= tolerance else f"off by {difference:.1%} of its largest element"


def switch_off_dropout(model: nn.Module) -> None:
    """Switch dropout off in a model in training mode: in evaluation, some families run other code."""
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
        for holder in (module, getattr(module, "config", None)):
            for name, value in list(vars(holder).items()) if holder is not None else ():
                if "drop" in name and isinstance(value, float):
                    setattr(holder, name, 0.0)


def copy_buffers(source: nn.Module, target: nn.Module) -> None:
    theirs = dict(source.named_buffers())
    for name, buffer in target.named_buffers():
        if name in theirs and theirs[name].shape == buffer.shape:
            buffer.copy_(theirs[name])


@contextlib.contextmanager
def seeded(number: int) -> Iterator[None]:
    """Draw the same random numbers each time, for any caller, and leave the caller's as they were."""
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
