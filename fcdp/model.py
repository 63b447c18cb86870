"""The model that the ranks of a cluster train: read from a checkpoint or made, given adapters, sharded, and run.

FSDP2 cuts every parameter along its first dimension into equal parts, so a rank's part is a range of rows. Where a
tensor on disk is the parameter, each rank reads its range alone. Parameters that are assembled first, random weights,
and adapters are made whole on every rank, one at a time."""

import contextlib
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from peft import PeftConfig
from peft.tuners.lora.layer import ParamWrapper
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.torch_version import TorchVersion
from transformers import PreTrainedConfig, PreTrainedModel

from common.data import Documents, restarts
from common.data.rows import PADDING, take_rows
from common.errors import UserError
from common.models.adapters.adapters import Adapters
from common.models.adapters.options import SavedAdapter
from common.models.adapters.towers import adapt_towers
from common.models.attention.documents import padding_known, rotate_by_document
from common.models.attention.isolation import DocumentSeparator, takes_positions
from common.models.checkpoint.random_source import RandomSource
from common.models.checkpoint.sources import CheckpointSource, WeightSource
from common.models.meta_model import build_meta_model
from common.models.presets import load_config
from common.models.structure import fp32_parameters
from common.models.vision import DEFAULT_FREEZING, TowerFreezing
from fcdp.fsdp2 import row_range
from fcdp.shard import fully_shard
from fcdp.strategy.strategy import Strategy
from fcdp.strategy.topology import Topology
from fuyou.layout.record import DTYPES
from fuyou.model.family import Family
from fuyou.model.loss.cross_entropy import targets_of
from fuyou.model.loss.router_loss import RouterLoss, RouterPass, find_router_loss, switch_router_logits
from fuyou.model.streamed_model import StreamedModel
from fuyou.optimizer.adam import AdamConfig, check_max_grad_norm

_FOR_THE_LOSS = {"targets", "labels", "counts", PADDING}  # what is not given to the model


@dataclass(frozen=True)
class TrainerConfig:
    """Options of :class:`fcdp.trainer.Trainer`."""

    strategy: Strategy | str = "fcdp"  # a strategy or its name; see :func:`fcdp.fully_shard`
    # Dtype in which blocks compute and gradients are reduced. Master weights and moments are fp32.
    dtype: str = "bf16"
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.01  # as with transformers' Trainer: biases and norms do not decay
    max_grad_norm: float | None = None  # norm to which the gradient is clipped; None: it is not
    # Sequences that a rank computes at once; None: its whole part of the batch
    micro_batch: int | None = None
    seed: int = 0  # seed of random weights and dropout
    # Host memory per rank for cached shards; see :func:`fcdp.fully_shard`
    host_cache_bytes: int | None = None
    # Part of device memory for cached shards; see :func:`fcdp.fully_shard`
    device_cache_threshold: float = 0.9
    towers: TowerFreezing = DEFAULT_FREEZING  # parts of a vision-language model that are not trained
    # ``auto`` (as the configuration has it), ``on``, or ``off``: the loss of a mixture of experts' router
    router_loss: str = "auto"

    def __post_init__(self) -> None:
        AdamConfig(betas=self.betas, eps=self.eps, weight_decay=self.weight_decay)  # which checks them
        check_max_grad_norm(self.max_grad_norm)


@dataclass(frozen=True)
class ClusterModel:
    """A sharded model, and what is known of it."""

    config: PreTrainedConfig
    checkpoint: Path | None  # directory of the checkpoint that it comes from; None: weights are random
    meta: PreTrainedModel  # the model on the meta device, neither sharded nor with adapters
    family: Family
    block_prefix: str  # name of the list of blocks
    module: Any  # the model that is trained: FSDP2's, with adapters, its weights not yet read
    adapters: Adapters | None
    source: WeightSource
    dtype: torch.dtype  # dtype in which blocks compute
    router_loss: RouterLoss | None  # what the loss has besides cross entropy

    @classmethod
    def open(
        cls,
        model: str | os.PathLike[str],
        topology: Topology,
        options: TrainerConfig,
        peft_config: PeftConfig | None,
        saved: SavedAdapter | None = None,
    ) -> "ClusterModel":
        """Check the model's files, and shard it; ``saved`` adapters are of ``peft_config``. Collective."""
        dtype = DTYPES[options.dtype]
        config, checkpoint = load_config(model)
        meta = build_meta_model(config, dtype=dtype, checkpoint=checkpoint)
        if dtype != torch.float32 and (names := fp32_parameters(meta)):
            # FSDP2 casts all that it gathers to one dtype
            raise UserError(
                f"This family keeps {names[0]} in fp32, which ranks in memory would round: give --dtype fp32, or --ssd "
                "to train it out of core."
            )
        router_loss = find_router_loss(meta, options.router_loss)
        stack = StreamedModel(meta, torch.device("cpu"))
        source = CheckpointSource(checkpoint, meta) if checkpoint else RandomSource(meta, options.seed)
        source.check()
        module: Any = build_meta_model(config, dtype=dtype)
        if peft_config is not None:
            if getattr(peft_config, "trainable_token_indices", None):
                # Peft reads a weight past FSDP2's hooks
                raise UserError(
                    "trainable_token_indices cannot be trained with sharded weights: name the embeddings in "
                    "modules_to_save, or train on one machine."
                )
            if saved is None:  # whose configuration says what it adapts
                adapt_towers(module, peft_config, options.towers)
        adapters = None if peft_config is None else Adapters(module, peft_config, options.seed, saved=saved)
        # peft computes with these without calling them: earlier, FSDP2 took a group's forward pass as unfinished then.
        is_earlier = TorchVersion(torch.__version__) < "2.13"
        if is_earlier and any(isinstance(each, ParamWrapper) for each in module.modules()):
            raise UserError(
                f"Adapters of experts over several ranks need PyTorch 2.13; this is {torch.__version__}."
            )
        for name in options.towers.frozen(module) if adapters is None else ():
            module.get_parameter(name).requires_grad_(False)
        switch_router_logits(module, router_loss is not None)
        rotate_by_document(module)
        widen(module)
        if module.supports_gradient_checkpointing:
            module.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        fully_shard(
            module,
            topology,
            options.strategy,
            mp_policy=MixedPrecisionPolicy(dtype, dtype),
            device_cache_threshold=options.device_cache_threshold,
            host_cache_bytes=options.host_cache_bytes,
        )
        materialise(module, topology.device)
        return cls(
            config,
            checkpoint,
            meta,
            stack.family,
            stack.block_prefix,
            module,
            adapters,
            source,
            dtype,
            router_loss,
        )

    def trained(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the parameters that the optimizer changes: all that are not frozen, or with adapters these."""
        for name, parameter in self.module.named_parameters():
            if parameter.requires_grad:
                yield name, parameter


class Forward:
    """Runs the model on this rank's part of each batch, ``micro_batch`` sequences (None: all of them) at once."""

    def __init__(self, model: ClusterModel, topology: Topology, micro_batch: int | None):
        self._model = model
        self._topology = topology
        self._micro_batch = micro_batch
        self._left_out = _FOR_THE_LOSS | (set() if takes_positions(model.meta) else {"position_ids"})
        self._separator: DocumentSeparator | None = None

    def micro_batches(self, rows: int) -> int:
        """Return how many micro-batches every rank computes of ``rows`` sequences."""
        most = math.ceil(rows / self._topology.world_size)
        return math.ceil(most / (self._micro_batch or most))

    def split(self, batch: Mapping[str, torch.Tensor]) -> tuple[list[dict[str, torch.Tensor]], int]:
        """Return this rank's micro-batches, as many as every rank has, and the number of labels of the whole batch.

        Each micro-batch is on the device and also has ``targets`` ``[rows, S]``, -100 where there is no label, and
        ``counts``, 1 for each token that is this rank's to count."""
        if restarts(batch.get("position_ids")):  # on all ranks alike, whichever of them has such rows
            self._model.family.check_documents(masked=False)
        targets = targets_of(batch["labels"], self._model.family.shifts_labels)
        batch = {**batch, "targets": targets}
        rows = batch["input_ids"].shape[0]
        world = self._topology.world_size
        rank = self._topology.rank
        if rows < world:
            raise UserError(f"--batch-size {rows} is less than one sequence for each of {world} ranks.")
        first = rows * rank // world
        last = rows * (rank + 1) // world
        count = self.micro_batches(rows)
        width = math.ceil(math.ceil(rows / world) / count)

        def to_device(value: torch.Tensor) -> torch.Tensor:
            dtype = self._model.dtype if value.is_floating_point() else None
            return value.to(self._topology.device, dtype, non_blocking=True)

        parts = []
        for start in range(first, first + count * width, width):
            stop = min(start + width, last)
            if start < stop:
                part = take_rows(batch, start, stop)
                part["counts"] = torch.ones_like(part["targets"])
                if PADDING in part:
                    part["counts"].masked_fill_(part[PADDING], 0)
            else:  # this rank has a sequence less than others: one more, that teaches nothing
                part = take_rows(batch, 0, 1)
                part["targets"] = torch.full_like(part["targets"], -100)
                part["counts"] = torch.zeros_like(part["targets"])
            parts.append({name: to_device(value) for name, value in part.items()})
        return parts, int((targets != -100).sum())

    def run(self, part: dict[str, torch.Tensor]) -> Any:
        """Return what the model gives for a micro-batch: ``logits``, and ``router_logits`` if they are requested."""
        inputs = {name: value for name, value in part.items() if name not in self._left_out}
        return self._model.module(**inputs, use_cache=False)

    def router_pass(self, parts: Sequence[dict[str, torch.Tensor]]) -> RouterPass | None:
        """Return the router loss of these micro-batches, to be given router logits; None if the loss has none."""
        loss = self._model.router_loss
        if loss is None:
            return None
        masks = []
        for part in parts:
            mask = part.get("attention_mask")
            masks.append(
                (part["counts"] if mask is None or mask.dim() != 2 else part["counts"] * mask)
                .flatten()
                .float()
            )
        return RouterPass(loss, masks)

    def combine(self, router: RouterPass) -> None:
        sums = torch.tensor(router.local_sums(), dtype=torch.float64, device=self._topology.device)
        dist.all_reduce(sums)
        router.combine([sums.tolist()])

    @contextlib.contextmanager
    def separate_documents(self, part: dict[str, torch.Tensor]) -> Iterator[None]:
        """Keep the documents of packed rows apart: around the backward pass, too, which runs blocks again."""
        documents = Documents.of(part.get("position_ids"))
        if documents is not None and self._separator is None:
            assert self._model.family.isolation is not None
            self._separator = DocumentSeparator(self._model.module, self._model.family.isolation)
        separated = contextlib.nullcontext() if self._separator is None else self._separator.apart(documents)
        with padding_known(part), separated:
            yield


def widen(model: nn.Module) -> None:
    """Turn the trained parameters of a model on the meta device into fp32 master weights. Tied ones stay tied."""
    wide: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.is_floating_point() and parameter.requires_grad:
                if id(parameter) not in wide:
                    value = torch.empty_like(parameter, dtype=torch.float32)
                    wide[id(parameter)] = nn.Parameter(value)
                setattr(module, name, wide[id(parameter)])


def materialise(model: nn.Module, device: torch.device) -> None:
    """Give the shards of a model on the meta device memory on ``device``, uninitialised. Buffers keep their values."""
    buffers = [(module, name, value) for module in model.modules() for name, value in module._buffers.items()]
    for module, name, _ in buffers:
        module._buffers[name] = None
    model.to_empty(device=device)
    for module, name, value in buffers:
        module._buffers[name] = None if value is None else value.to(device)


def load(model: nn.Module, source: WeightSource, adapters: Adapters | None = None) -> None:
    """Fill the shards of ``model`` from ``source``, and those of ``adapters`` with their first values. Collective."""
    shards = {name: cast(DTensor, parameter) for name, parameter in model.named_parameters()}
    new = adapters.own_names if adapters is not None else ()
    names = adapters.base_names if adapters is not None else {name: name for name in shards}
    adapter_names = set(new)
    by_source = {names[name]: shard for name, shard in shards.items() if name not in adapter_names}
    if adapters is not None:
        adapters.check_saved(source)
    assembled = []
    for name, shard in by_source.items():
        if isinstance(source, CheckpointSource) and (stored := source.stored_as(name)) is not None:
            start, stop = row_range(shard)
            if start < stop:
                with torch.no_grad():
                    shard.to_local().copy_(source.shards.read_rows(stored, start, stop))
        else:
            assembled.append(name)
    for name, value in source.read(assembled):
        _keep_rows(by_source[name], value)
    for name in new:
        assert adapters is not None
        _keep_rows(shards[name], adapters.initial_value(name, source))
    for name, value in source.read_buffers():
        model.get_buffer(name if adapters is None else adapters.buffer_names[name]).copy_(value)


def _keep_rows(shard: DTensor, value: torch.Tensor) -> None:
    start, stop = row_range(shard)
    with torch.no_grad():
        shard.to_local().copy_(value[start:stop])


def gather_blocks(
    model: nn.Module, prefix: str, dtype: torch.dtype | None, group: Callable[[str], str] = str
) -> Iterator[dict[str, torch.Tensor]]:
    """Yield all parameters, those of one block (of the list ``prefix``) at a time, then those outside blocks.

    Collective: every rank iterates to the end. Outside blocks those with equal keys of ``group`` come together."""
    by_layer: dict[str, list[str]] = {}
    for name, _ in model.named_parameters():
        inside = name.startswith(f"{prefix}.")
        layer = f"block {name.removeprefix(f'{prefix}.').partition('.')[0]}" if inside else group(name)
        by_layer.setdefault(layer, []).append(name)
    for names in by_layer.values():
        yield {name: whole(model.get_parameter(name), dtype) for name in names}


def whole(parameter: nn.Parameter, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return a sharded parameter put together on every rank, in ``dtype`` or its own. Collective."""
    return cast(DTensor, parameter.detach().to(dtype or parameter.dtype)).full_tensor()
