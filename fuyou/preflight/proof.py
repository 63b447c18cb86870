"""Prove before a run, on a small model of the same family, that streaming it block by block changes nothing.

The configuration is shrunk by rule (:mod:`common.models.miniature`), filled with random weights, and trained both ways
on the same batches: by transformers in memory, and by the engine's parts, schedule, and computation
(:mod:`fuyou.preflight.small_step`). Losses and every gradient must be equal, in a first step, in a second one, in which
blocks recompute by the trace of the first, and with several micro-batches. So no list of supported families is needed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from peft import PeftConfig
from transformers import PreTrainedConfig

from common.errors import FinetuneError, UserError, on_one_line
from common.files import read_cached, write_cached
from common.models.miniature import TOKENS
from fuyou.layout.record import Precision
from fuyou.model.open_model import OpenModel
from fuyou.pieces.division import in_pieces
from fuyou.preflight.claim import (
    DOCUMENTS_APART,
    NARROW,
    ORDER_OF_SUMS,
    Claim,
    Gradients,
    copy_buffers,
    first_difference,
    quietly,
    seeded,
    switch_off_dropout,
)
from fuyou.preflight.memory_twin import ROWS, MemoryTwin
from fuyou.preflight.small_step import SmallStep

FORMAT = 1
_KIND = "proofs"
_CHUNK = TOKENS * 3 // 8  # Tokens of a chunk: of three, the last is the shortest


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
            between
            blocks as inside them.

    Raises:
        UserError: if it does not, or no small model could be built; says which tensor differs first.
    """
    names = None if trainable is None else tuple(trainable)
    claim = Claim(config, adapters, names, router_loss=router_loss)
    _prove(claim)
    if dtype != torch.float32:
        try:
            _prove(replace(claim, router_loss="off", dtype=dtype))
        except _RefusedError as error:
            short = str(dtype).removeprefix("torch.")
            raise UserError(f"{error} In fp32 they are equal: train it with dtype fp32 instead of {short}.") from error
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
    claim = Claim(config, adapters, names, router_loss=router_loss, pieces=not chunks, chunks=chunks)
    _prove(claim)
    if packed:
        _prove(replace(claim, packed=True, router_loss="off"))


def _prove(claim: Claim) -> None:
    small = claim.small_config()
    key = claim.key(small)
    if read_cached(_KIND, key, FORMAT) is not None:
        return
    with quietly(), seeded(0), torch.autocast("cpu", enabled=False):
        _Proof(claim, small).run()
    write_cached(_KIND, key, FORMAT)


class _RefusedError(UserError):
    """Raised when streaming a small model gives other numbers."""


class _Proof:
    def __init__(self, claim: Claim, small: PreTrainedConfig):
        self._claim, self._small = claim, small
        self._name = claim.config.model_type
        self._tolerance = DOCUMENTS_APART if claim.packed else ORDER_OF_SUMS
        if claim.dtype != torch.float32:
            self._tolerance = NARROW

    def run(self) -> None:
        claim = self._claim
        try:
            twin = MemoryTwin(claim, self._small)
        except UserError as error:
            raise self._unprovable(error) from error
        opened = OpenModel(
            self._small, Precision(claim.dtype, torch.float32), torch.device("cpu"), twin.adapters, twin.trainable
        )
        if claim.pieces:
            opened.shape = in_pieces(opened.stack, opened.shape, 1)
        try:
            twin.build(opened.shape)
        except Exception as error:
            raise self._unprovable(error) from error
        copy_buffers(twin.model, opened.stack.model)
        if claim.packed:  # documents alone draw other numbers
            self._without_dropout(twin, opened)
        step = SmallStep(opened, dict(twin.model.named_parameters(remove_duplicate=False)))
        if claim.chunks:  # of which each drops out other values
            self._without_dropout(twin, opened)
            if not twin.repeats(twin.batch(0)):
                raise self._refusal("losses depend on random numbers, which are others for each chunk")
            for number in range(2):
                self._step(number, twin, opened, step, 1, _CHUNK)
            return
        for number in range(2):  # with dropout and all that the configuration asks for
            self._step(number, twin, opened, step, ROWS)
        if claim.dtype != torch.float32:  # in which a row alone may be rounded otherwise
            return
        self._without_dropout(twin, opened)
        if twin.repeats(twin.batch(2)):  # several micro-batches draw their random numbers in another order
            self._step(2, twin, opened, step, 1)

    @staticmethod
    def _without_dropout(twin: MemoryTwin, opened: OpenModel) -> None:
        for model in (twin.model, opened.stack.model):
            switch_off_dropout(model)

    def _step(
        self,
        number: int,
        twin: MemoryTwin,
        opened: OpenModel,
        step: SmallStep,
        micro_rows: int,
        chunk: int | None = None,
    ) -> None:
        for model in (twin.model, opened.stack.model):
            model.train()
        batch = twin.batch(number)
        try:
            with seeded(number):
                expected = twin.run(batch, opened.stack.family.shifts_labels)
        except Exception as error:
            raise self._unprovable(error) from error
        with seeded(number):
            gradients = self._streamed(step, batch, micro_rows, chunk)
        difference = first_difference(expected, gradients, self._tolerance)
        if difference is not None:
            raise self._refusal(difference + (" with each document separately" if self._claim.packed else ""))

    def _streamed(
        self, step: SmallStep, batch: Mapping[str, torch.Tensor], micro_rows: int, chunk: int | None
    ) -> Gradients:
        try:
            loss = step.run(batch, micro_rows, chunk)
        except FinetuneError:
            raise
        except Exception as error:
            raise UserError(
                f"{self._name} cannot be trained out of core: a small model of this family runs in memory, and fails "
                f"block by block ({type(error).__name__}: {on_one_line(error)})."
            ) from error
        return Gradients(loss, step.gradients)

    def _refusal(self, what: str) -> _RefusedError:
        kind = " with LoRA" if self._claim.adapters is not None else ""
        kind += " with rows in chunks" if self._claim.chunks else ""
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
