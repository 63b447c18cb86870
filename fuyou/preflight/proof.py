"""Prove before a run, on a small model of the same family, that streaming it block by block changes nothing.

The configuration is shrunk by rule (:mod:`common.models.miniature`), filled with random weights, and trained both ways
on the same batches (:mod:`fuyou.preflight.twins`). Losses and every gradient must be equal, in a first step, in a
second one, in which blocks recompute by the trace of the first, and with several micro-batches. So no list of supported
families is needed.
"""

import contextlib
import hashlib
import json
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from peft import PeftConfig
from torch import nn
from transformers import PreTrainedConfig

from common.errors import FinetuneError, UserError, on_one_line
from common.files import read_cached, write_cached
from common.models.miniature import TOKENS, miniature, on_one_thread
from fuyou.layout.record import Precision
from fuyou.model.open_model import OpenModel, same_text
from fuyou.pieces.division import in_pieces
from fuyou.preflight.twins import ROWS, MemoryTwin, SmallStep, config_parts, seeded

FORMAT = 1
_KIND = "proofs"
_CHUNK = TOKENS * 3 // 8  # Tokens of a chunk: of three, the last is the shortest


class _Tolerance(NamedTuple):
    """Largest differences that rounding may cause."""

    # Of a tensor's gradient, relative to its largest element (or a hundredth of the whole gradient's). What is lost or
    # wrong is larger by orders of magnitude.
    gradient: float
    loss: float  # Relative


_ORDER_OF_SUMS = _Tolerance(1e-4, 2e-6)  # The same operators, gradients summed in another order in fp32
_DOCUMENTS_APART = _Tolerance(2e-3, 2e-5)  # Documents of packed rows, and each of them computed alone
_NARROW = _Tolerance(0.05, 2e-6)  # bf16, where a sum over a tied parameter's two places is rounded once more


@dataclass(frozen=True)
class _Claim:
    """A statement to prove; fields as the arguments of :func:`prove` and :func:`prove_divided`."""

    config: PreTrainedConfig
    adapters: PeftConfig | None = None
    trainable: tuple[str, ...] | None = None
    packed: bool = False
    router_loss: str = "auto"
    dtype: torch.dtype = torch.float32
    pieces: bool = False  # whether blocks are cut into the smallest pieces
    chunks: bool = False  # whether rows pass in chunks of tokens

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
        settled: dict[str, Any] = {
            **vars(self),
            "config": {name: value for name, value in small.to_dict().items() if name != "_name_or_path"},
            "adapters": None if self.adapters is None else self.adapters.to_dict(),
            "dtype": str(self.dtype),
        }
        return {
            "claim": json.loads(json.dumps(settled, sort_keys=True, default=same_text)),
            "versions": {name: metadata.version(name) for name in ("torch", "transformers", "peft")},
            "code": own_code(),
        }


@cache
def own_code() -> str:
    """Return a digest of the code that the proof is about."""
    root = Path(__file__).parents[2]
    digest = hashlib.sha256()
    for folder in ("fuyou", "common/models", "common/data"):
        for file in sorted((root / folder).rglob("*.py")):
            digest.update(file.read_bytes())
    return digest.hexdigest()[:24]


def prove(
    config: PreTrainedConfig,
    *,
    adapters: PeftConfig | None = None,
    trainable: Sequence[str] | None = None,
    packed: bool = False,
    router_loss: str = "auto",
    dtype: torch.dtype = torch.float32,
) -> None:
    """Prove on a small model that this family trains out of core as it does in memory.

    Takes a second or two. A proof is cached, and holds until transformers, torch, peft, or this package change.

    Args:
        config: of the model.
        adapters: what is trained, if the weights are frozen.
        trainable: name patterns (with ``*``) of the trained parameters, if not all.
        packed: whether rows will hold several documents with position ids that restart; this is proven, too.
        router_loss: of a mixture of experts, as in :class:`fuyou.Engine`.
        dtype: compute dtype. Most is proven in fp32, where rounding hides nothing; then, that this dtype is the same
            between blocks as inside them.

    Raises:
        UserError: if it does not, or no small model could be built; says which tensor differs first.
    """
    names = None if trainable is None else tuple(trainable)
    claim = _Claim(config, adapters, names, router_loss=router_loss)
    _prove(claim)
    if dtype != torch.float32:
        try:
            _prove(replace(claim, router_loss="off", dtype=dtype))
        except _RefusedError as error:
            short = str(dtype).removeprefix("torch.")
            raise UserError(
                f"{error} In fp32 they are equal: train it with --dtype fp32 instead of {short}."
            ) from error
    if packed:  # documents that are computed one by one have separate router losses
        _prove(replace(claim, packed=True, router_loss="off"))


def prove_divided(
    config: PreTrainedConfig,
    *,
    chunks: bool = False,
    packed: bool = False,
    adapters: PeftConfig | None = None,
    trainable: Sequence[str] | None = None,
    router_loss: str = "auto",
) -> None:
    """Prove on a small model that this family trains in pieces, as small as its blocks can be cut.

    Args:
        config: of the model.
        chunks: whether rows pass in chunks of tokens through whole blocks instead.
        packed: whether these rows hold several documents.
        adapters: what is trained, if the weights are frozen.
        trainable: name patterns of the trained parameters, if not all.
        router_loss: of a mixture of experts, as in :class:`fuyou.Engine`.

    Raises:
        UserError: if it does not, or its blocks cannot be cut.
    """
    names = None if trainable is None else tuple(trainable)
    claim = _Claim(config, adapters, names, router_loss=router_loss, pieces=not chunks, chunks=chunks)
    _prove(claim)
    if packed:
        _prove(replace(claim, packed=True, router_loss="off"))


def _prove(claim: _Claim) -> None:
    small = claim.small_config()
    key = claim.key(small)
    if read_cached(_KIND, key, FORMAT) is not None:
        return
    with _quietly(), seeded(0), on_one_thread(), torch.autocast("cpu", enabled=False):
        _Proof(claim, small).run()
    write_cached(_KIND, key, FORMAT)


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Silence what families say about small configurations."""
    verbosity = transformers.logging.get_verbosity()
    try:
        transformers.logging.set_verbosity_error()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        transformers.logging.set_verbosity(verbosity)


class _RefusedError(UserError):
    """Raised when streaming a small model gives other numbers."""


class _Proof:
    def __init__(self, claim: _Claim, small: PreTrainedConfig):
        self._claim = claim
        self._small = small
        self._name = claim.config.model_type
        self._is_narrow = claim.dtype != torch.float32

    def run(self) -> None:
        claim = self._claim
        try:
            twin = MemoryTwin(self._small, claim.dtype, claim.adapters, claim.trainable, claim.packed)
        except UserError as error:
            raise self._unprovable(error) from error
        opened = OpenModel(
            self._small, Precision(claim.dtype), torch.device("cpu"), twin.adapters, twin.trainable
        )
        if claim.pieces:
            opened.layout = in_pieces(opened.stack, opened.layout, 1)
        try:
            twin.build(opened.layout)
            exchanged = twin.exchanged_module()
        except Exception as error:
            raise self._unprovable(error) from error
        if exchanged is not None:
            raise _RefusedError(
                f"{self._name} cannot be trained out of core: a forward pass exchanges {exchanged} by the length of "
                "rows, and blocks that are computed separately keep theirs. Nothing was written."
            )
        models, theirs = (twin.model, opened.stack.model), dict(twin.model.named_buffers())
        for name, buffer in opened.stack.model.named_buffers():
            if name in theirs and theirs[name].shape == buffer.shape:
                buffer.copy_(theirs[name])
        step = SmallStep(opened, dict(twin.model.named_parameters(remove_duplicate=False)))
        shifts_labels = opened.stack.family.shifts_labels

        def compare(number: int, micro_rows: int, chunk: int | None = None) -> None:
            for model in models:
                model.train()
            batch = twin.batch(number)
            try:
                with seeded(number):
                    expected = twin.run(batch, shifts_labels)
            except Exception as error:
                raise self._unprovable(error) from error
            try:
                with seeded(number):
                    loss = step.run(batch, micro_rows, chunk)
            except FinetuneError:
                raise
            except Exception as error:
                raise UserError(
                    f"{self._name} cannot be trained out of core: a small model of this family runs in memory, and "
                    f"fails block by block ({type(error).__name__}: {on_one_line(error)})."
                ) from error
            self._compare((expected, twin.gradients), (loss, step.gradients))

        if claim.packed or claim.chunks:  # documents alone and chunks draw other numbers
            _switch_off_dropout(*models)
        if claim.chunks:
            if not twin.repeats(twin.batch(0)):
                raise self._refusal("losses depend on random numbers, which are others for each chunk")
            for number in range(2):
                compare(number, 1, _CHUNK)
            return
        for number in range(2):  # with dropout and all that the configuration asks for
            compare(number, ROWS)
        if self._is_narrow:  # in which a row alone may be rounded otherwise
            return
        _switch_off_dropout(*models)
        if twin.repeats(twin.batch(2)):  # several micro-batches draw their random numbers in another order
            compare(2, 1)

    def _compare(self, expected: "_Result", actual: "_Result") -> None:
        """Refuse the family at the first difference between losses and gradients beyond what rounding may cause."""
        tolerance = _DOCUMENTS_APART if self._claim.packed else _NARROW if self._is_narrow else _ORDER_OF_SUMS
        (loss, gradients), (actual_loss, actual_gradients) = expected, actual
        if not abs(actual_loss - loss) <= tolerance.loss * max(1.0, abs(loss)):
            raise self._refusal(f"the loss is {actual_loss:.6f}, and {loss:.6f} in memory")
        largest = max(
            (float(value.abs().max()) for value in gradients.values() if value is not None), default=0.0
        )
        wrong = []
        for name, gradient in actual_gradients.items():
            how = _deviation(gradients[name], gradient, 0.01 * largest, tolerance.gradient)
            if how is not None:
                wrong.append(f"the gradient of {name} is {how}")
        if wrong:
            raise self._refusal(f"{wrong[0]} (the first of {len(wrong)} of {len(actual_gradients)} tensors)")

    def _refusal(self, what: str) -> _RefusedError:
        kind = " with LoRA" if self._claim.adapters is not None else ""
        kind += " with rows in chunks" if self._claim.chunks else ""
        kind += f" in {str(self._claim.dtype).removeprefix('torch.')}" if self._is_narrow else ""
        what += " with each document separately" if self._claim.packed else ""
        return _RefusedError(
            f"{self._name} cannot be trained out of core{kind}: of a small model of this family, computed block by "
            f"block, {what}. Nothing was written."
        )

    def _unprovable(self, error: Exception) -> UserError:
        return UserError(
            f"Whether {self._name} trains out of core as in memory cannot be shown: a small model of this family does "
            f"not train in memory ({type(error).__name__}: {' '.join(str(error).split())[:300]})."
        )


# A loss, and gradients by name; None if there is none
_Result = tuple[float, Mapping[str, torch.Tensor | None]]


def _deviation(
    expected: torch.Tensor | None, actual: torch.Tensor | None, least: float, tolerance: float
) -> str | None:
    if expected is None or actual is None:
        there = expected if actual is None else actual
        if there is None or float(there.abs().max()) == 0:
            return None
        return "there in memory only" if actual is None else "not there in memory"
    scale = max(float(expected.abs().max()), least)
    difference = float((actual.float() - expected.float()).abs().max()) / scale
    return None if difference <= tolerance else f"off by {difference:.1%} of its largest element"


def _switch_off_dropout(*models: nn.Module) -> None:
    """Switch dropout and routers' noise off in models in training mode: in evaluation, some families run other code."""
    for module in (module for model in models for module in model.modules()):
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
        for holder in (module, getattr(module, "config", None)):
            for name, value in list(vars(holder).items()) if holder is not None else ():
                if ("drop" in name or "jitter" in name) and isinstance(value, float):
                    setattr(holder, name, 0.0)
