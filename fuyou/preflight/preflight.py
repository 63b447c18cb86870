"""Before a run: the proof, on a small model of the same family, that streaming it block by block changes nothing.

The configuration is shrunk by rule (:mod:`common.models.miniature`), filled with random weights, and trained both ways
on the same batches: as transformers' own code in memory, and through the engine's parts, schedule and computation
(:mod:`fuyou.preflight.small_step`). Losses and every gradient must be equal, in a first step, in a second one, in which
blocks recompute by what the first one has traced, and with several micro-batches. So no list says which families are
supported: what cannot be split shows itself, whatever the reason.
"""

import copy
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import PeftConfig, get_peft_model
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from common.errors import FinetuneError, UserError
from common.files.result_cache import read_cached, write_cached
from common.models.adapters.options import ALL_LINEAR
from common.models.meta_model import build_meta_model
from common.models.miniature import TOKENS, VOCABULARY, miniature
from common.models.task_type import TaskType, task_type_of
from fuyou.layout.record import Precision
from fuyou.model.loss.cross_entropy import targets_of
from fuyou.model.open_model import OpenModel, same_text
from fuyou.pieces.cut import in_pieces
from fuyou.preflight.same_conditions import copy_buffers, quietly, seeded, switch_off_dropout
from fuyou.preflight.small_step import SmallStep

ROWS = 2
FORMAT = 1
_KIND = "proofs"
TOLERANCE = 1e-4
"""Deviation of a tensor's gradient, relative to its largest element (or a hundredth of the whole gradient's): what
another order of summation in fp32 may come to. What is lost or wrong is larger by orders of magnitude."""
TOLERANCE_APART = 2e-3
"""Deviation likewise where documents of packed rows are compared with each computed alone."""
TOLERANCE_NARROW = 0.05
"""Deviation likewise in bf16, where a sum over a tied parameter's two places is rounded once more."""
LOSS, LOSS_APART = 2e-6, 2e-5
"""Relative deviation of a loss, alone and of packed rows: the same operators give the same numbers."""


@dataclass(frozen=True)
class Claim:
    """A statement that is to be proven.

    Args:
        config: of the run's model; its small one is used.
        adapters: that are trained, if any.
        trainable: names of what is trained, if not everything.
        packed: whether rows hold several documents, with position ids that start again.
        router_loss: of a mixture of experts: ``"on"``, ``"off"``, or ``"auto"``, which leaves it to the configuration.
        dtype: that is computed in.
        pieces: whether blocks are cut into pieces, as small as can be.
    """

    config: PreTrainedConfig
    adapters: PeftConfig | None = None
    trainable: tuple[str, ...] | None = None
    packed: bool = False
    router_loss: str = "auto"
    dtype: torch.dtype = torch.float32
    pieces: bool = False

    def small_config(self) -> PreTrainedConfig:
        """Return the small configuration, with the router loss that is asked for."""
        small = miniature(self.config)
        if small.num_labels == 1:  # a reward: its head is that of classes, and its loss is the caller's
            small.num_labels = 2
        if self.router_loss != "auto":
            for part in _parts(small):
                if hasattr(part, "output_router_logits"):
                    part.output_router_logits = self.router_loss == "on"
        return small

    def key(self, small: PreTrainedConfig) -> dict[str, Any]:
        """Return everything that the proof depends on, as JSON can carry it."""
        fields = {name: value for name, value in small.to_dict().items() if name not in ("_name_or_path",)}
        adapters = None if self.adapters is None else self.adapters.to_dict()
        settled: dict[str, Any] = {
            "config": fields,
            "adapters": adapters,
            "trainable": self.trainable,
            "packed": self.packed,
            "router_loss": self.router_loss,
            "dtype": str(self.dtype),
            **({"pieces": True} if self.pieces else {}),
        }
        return {
            "claim": json.loads(json.dumps(settled, sort_keys=True, default=same_text)),
            "versions": {name: metadata.version(name) for name in ("torch", "transformers", "peft")},
            "code": _own_code(),
        }


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

    Takes a second or two; a proof is kept in the cache directory and holds until transformers, torch, peft or this
    package change.

    Args:
        config: of the model that is to be trained.
        adapters: what is trained, if the weights are frozen.
        trainable: names of the parameters that are trained, if not all are; ``*`` stands for anything.
        packed: whether rows will hold several documents with position ids that restart at each: this is proven, too.
        router_loss: of a mixture of experts, as :class:`fuyou.Engine` has it.
        dtype: that will be computed in. Most is proven in fp32, where rounding hides nothing; then, that this dtype is
            the same between blocks as inside them.

    Raises:
        UserError: it does not, or no small model could be built to prove it with; says which tensor differs first.
    """
    names = None if trainable is None else tuple(trainable)
    _prove(Claim(config, adapters, names, router_loss=router_loss))
    if dtype != torch.float32:
        try:
            _prove(Claim(config, adapters, names, router_loss="off", dtype=dtype))
        except _RefusedError as error:
            short = str(dtype).removeprefix("torch.")
            raise UserError(f"{error} In fp32 they are equal: train it with dtype fp32 instead of {short}.") from error
    if packed:  # documents that are computed one by one have router losses of their own
        _prove(Claim(config, adapters, names, packed=True, router_loss="off"))


def prove_pieces(
    config: PreTrainedConfig,
    *,
    adapters: PeftConfig | None = None,
    trainable: Sequence[str] | None = None,
    router_loss: str = "auto",
) -> None:
    """Prove on a small model that this family trains in pieces, as small as its blocks can be cut.

    Args:
        config: of the model that is to be trained.
        adapters: what is trained, if the weights are frozen.
        trainable: names of the parameters that are trained, if not all are.
        router_loss: of a mixture of experts, as :class:`fuyou.Engine` has it.

    Raises:
        UserError: it does not, or its blocks cannot be cut.
    """
    names = None if trainable is None else tuple(trainable)
    _prove(Claim(config, adapters, names, router_loss=router_loss, pieces=True))


def _prove(claim: Claim) -> None:
    small = claim.small_config()
    key = claim.key(small)
    if read_cached(_KIND, key, FORMAT) is not None:
        return
    with quietly(), seeded(0):
        _Proof(claim, small).run()
    write_cached(_KIND, key, FORMAT)


class _RefusedError(UserError):
    """Streaming a small model gave other numbers."""


@dataclass(frozen=True)
class _Pass:
    """A loss, and gradients by every name of each parameter; None where there is none."""

    loss: float
    gradients: Mapping[str, torch.Tensor | None]


class _Proof:
    def __init__(self, claim: Claim, small: PreTrainedConfig):
        self._claim, self._small = claim, small
        self._name = claim.config.model_type

    def run(self) -> None:
        claim = self._claim
        precision, cpu = Precision(claim.dtype, torch.float32), torch.device("cpu")
        try:
            plain = build_meta_model(self._small, dtype=claim.dtype)
        except UserError as error:
            raise self._unprovable(error) from error
        adapters, trainable = self._small_adapters(plain), claim.trainable and self._small_names(plain)
        opened = OpenModel(self._small, precision, cpu, adapters, trainable)
        if claim.pieces:
            opened.shape = in_pieces(opened.stack, opened.shape, 1)
        try:
            whole = self._whole_model(plain, adapters)
        except Exception as error:
            raise self._unprovable(error) from error
        self._shifts = opened.stack.family.shifts_labels
        names = {name for record in opened.shape.records for slot in record.parameters for name in slot.names}
        frozen = {
            name
            for record in opened.shape.records
            for slot in record.parameters
            for name in slot.names
            if slot.name not in record.trained_names
        }
        values = dict(whole.named_parameters(remove_duplicate=False))
        for name, value in values.items():
            value.requires_grad_(name in names and name not in frozen)
        copy_buffers(whole, opened.stack.model)
        if claim.packed:  # documents by themselves draw other numbers
            for model in (whole, opened.stack.model):
                switch_off_dropout(model)
        step = SmallStep(opened, values)
        for number in range(2):  # with dropout and all that the configuration asks for
            self._step(number, whole, opened, step, ROWS)
        if claim.dtype != torch.float32:  # in which a row alone may be rounded otherwise
            return
        for model in (whole, opened.stack.model):
            switch_off_dropout(model)
        losses = []
        for seed in (2, 3):
            with seeded(seed), torch.no_grad():
                losses.append(float(whole(**self._batch(2), use_cache=False).loss))
        if losses[0] == losses[1]:  # several micro-batches draw their random numbers in another order
            self._step(2, whole, opened, step, 1)

    def _step(self, number: int, whole: nn.Module, opened: OpenModel, step: SmallStep, micro_rows: int) -> None:
        for model in (whole, opened.stack.model):
            model.train()
        batch = self._batch(number)
        try:
            with seeded(number):
                expected = self._in_memory(whole, batch)
        except Exception as error:
            raise self._unprovable(error) from error
        with seeded(number):
            found = self._streamed(step, batch, micro_rows)
        self._compare(expected, found)

    def _whole_model(self, plain: PreTrainedModel, adapters: PeftConfig | None) -> nn.Module:
        """Build the small model in memory, of the class and with the router loss that the engine would have."""
        config = copy.deepcopy(plain.config)
        for part, asked in zip(_parts(config), _parts(self._small), strict=True):
            if hasattr(part, "output_router_logits"):
                part.output_router_logits = getattr(asked, "output_router_logits", False)
        torch.manual_seed(1)
        model: nn.Module = type(plain)._from_config(config, dtype=self._claim.dtype)
        if adapters is not None:  # a copy, as peft fills in what is left out; the engine names things as inside
            model = get_peft_model(model, copy.deepcopy(adapters)).get_submodule("base_model.model")  # type: ignore[arg-type]
        generator = torch.Generator().manual_seed(2)
        with torch.no_grad():
            for parameter in model.parameters():  # so that no path is idle because it begins with zeros
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.add_(noise, alpha=0.1 if parameter.dim() > 1 else 0.02)
        return model

    def _small_names(self, plain: nn.Module) -> list[str]:
        """Return those of the patterns that the small model has parameters for: it has fewer layers."""
        names = [name for name, _ in plain.named_parameters()]
        found = [
            pattern for pattern in self._claim.trainable or () if any(fnmatchcase(name, pattern) for name in names)
        ]
        return found or names

    def _small_adapters(self, plain: nn.Module) -> PeftConfig | None:
        """Return the adapters, wherever they find a place in fewer layers; on all linear layers if they find none."""
        adapters = copy.deepcopy(self._claim.adapters)
        if adapters is None:
            return None
        for field in ("layers_to_transform", "layers_pattern"):
            if getattr(adapters, field, None) is not None:
                setattr(adapters, field, None)
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

    def _batch(self, number: int) -> dict[str, torch.Tensor]:
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

    def _in_memory(self, model: nn.Module, batch: Mapping[str, torch.Tensor]) -> _Pass:
        parts = [
            {name: batch[name][..., piece].contiguous() for name in ("input_ids", "labels")}
            for piece in self._documents()
        ]
        counts = [int((targets_of(part["labels"], self._shifts) != -100).sum()) for part in parts]
        model.zero_grad(set_to_none=True)
        total = 0.0
        for part, count in zip(parts, counts, strict=True):
            loss = model(**part, use_cache=False).loss * (count / sum(counts))
            loss.backward()
            total += float(loss)
        if not np.isfinite(total):
            raise ArithmeticError(f"its loss is {total}")
        return _Pass(total, {name: one.grad for name, one in model.named_parameters(remove_duplicate=False)})

    def _streamed(self, step: SmallStep, batch: Mapping[str, torch.Tensor], micro_rows: int) -> _Pass:
        try:
            loss = step.run(batch, micro_rows)
        except FinetuneError:
            raise
        except Exception as error:
            raise UserError(
                f"{self._name} cannot be trained out of core: a small model of this family runs in memory, and fails "
                f"block by block ({type(error).__name__}: {' '.join(str(error).split())})."
            ) from error
        return _Pass(loss, step.gradients)

    def _compare(self, expected: _Pass, found: _Pass) -> None:
        """Compare losses and gradients.

        Raises:
            UserError: they are not equal.
        """
        packed, narrow = self._claim.packed, self._claim.dtype != torch.float32
        tolerance = TOLERANCE_NARROW if narrow else TOLERANCE_APART if packed else TOLERANCE
        if not abs(found.loss - expected.loss) <= (LOSS_APART if packed else LOSS) * max(1.0, abs(expected.loss)):
            raise self._refusal(
                f"the loss is {found.loss:.6f}, and {expected.loss:.6f} in memory"
                + (" with each document by itself" if self._claim.packed else "")
            )
        whole = max((float(one.abs().max()) for one in expected.gradients.values() if one is not None), default=0.0)
        wrong = []
        for name, gradient in found.gradients.items():
            true = expected.gradients[name]
            if gradient is None or true is None:
                if gradient is not true and float((gradient if true is None else true).abs().max()) > 0:  # type: ignore[union-attr]
                    wrong.append((name, "there in memory only" if gradient is None else "not there in memory"))
                continue
            scale = max(float(true.abs().max()), 0.01 * whole)
            difference = float((gradient.float() - true.float()).abs().max()) / scale
            if not difference <= tolerance:
                wrong.append((name, f"off by {difference:.1%} of its largest element"))
        if wrong:
            name, how = wrong[0]
            raise self._refusal(
                f"the gradient of {name} is {how} (the first of {len(wrong)} of {len(found.gradients)} tensors)"
            )

    def _refusal(self, what: str) -> _RefusedError:
        kind = " with LoRA" if self._claim.adapters is not None else ""
        kind += "" if self._claim.dtype == torch.float32 else f" in {str(self._claim.dtype).removeprefix('torch.')}"
        return _RefusedError(
            f"{self._name} cannot be trained out of core{kind}: of a small model of this family, computed block by "
            f"block, {what}. Nothing was written."
        )

    def _unprovable(self, error: Exception) -> UserError:
        return UserError(
            f"Whether {self._name} trains out of core as in memory cannot be shown: a small model of this family does "
            f"not train in memory ({type(error).__name__}: {' '.join(str(error).split())[:300]})."
        )


def _parts(config: PreTrainedConfig) -> tuple[PreTrainedConfig, PreTrainedConfig]:
    return config, config.get_text_config(decoder=True)


# -- what is kept ----------------------------------------------------------------------------------------------------


@cache
def _own_code() -> str:
    """Return a digest of the code that the proof is about."""
    root, digest = Path(__file__).parents[2], hashlib.sha256()
    for folder in ("fuyou", "common/models", "common/data"):
        for file in sorted((root / folder).rglob("*.py")):
            digest.update(file.read_bytes())
    return digest.hexdigest()[:24]
