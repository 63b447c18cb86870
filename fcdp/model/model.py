"""The model that the ranks of a cluster train: read from a checkpoint or made, given adapters, sharded."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import PeftConfig
from peft.tuners.lora.layer import ParamWrapper
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.torch_version import TorchVersion
from transformers import PreTrainedConfig, PreTrainedModel

from common.communication import broadcast_from_rank0
from common.errors import UserError
from common.models.adapters.adapters import MERGED, Adapters
from common.models.adapters.options import SavedAdapter
from common.models.attention.documents import rotate_by_document
from common.models.checkpoint.export import CheckpointWriter
from common.models.checkpoint.random_source import RandomSource
from common.models.checkpoint.sources import CheckpointSource, WeightSource
from common.models.flops import active_parameters, hardware_flops_per_token, model_flops_per_token
from common.models.meta_model import build_meta_model
from common.models.presets import load_config
from common.models.vision import DEFAULT_FREEZING, TowerFreezing
from fcdp.model.weights import gather_blocks, load, materialise, whole, widen
from fcdp.shard import fully_shard, sharding
from fcdp.sharding import Sharding
from fcdp.strategy.strategy import Strategy
from fcdp.strategy.topology import Topology
from fuyou.layout.record import DTYPES
from fuyou.model.family import Family
from fuyou.model.loss.router_loss import RouterLoss, find_router_loss, switch_router_logits
from fuyou.model.streamed_model import StreamedModel
from fuyou.optimizer.adam import AdamConfig, check_max_grad_norm

_SHARD_BYTES = 2_000_000_000  # largest shard of an exported checkpoint. Rank 0 holds one.


@dataclass(frozen=True)
class TrainerConfig:
    """Options of :class:`fcdp.trainer.Trainer`."""

    strategy: Strategy | str = "fcdp"  # a strategy or its name; see :func:`fcdp.fully_shard`
    dtype: str = "bf16"  # dtype in which blocks compute and gradients are reduced. Master weights and moments are fp32.
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.01  # as with transformers' Trainer: biases and norms do not decay
    max_grad_norm: float | None = None  # norm to which the gradient is clipped; None: it is not
    micro_batch: int | None = None  # sequences that a rank computes at once; None: its whole part of the batch
    seed: int = 0  # seed of random weights and dropout
    host_cache_bytes: int | None = None  # host memory per rank for cached shards; see :func:`fcdp.fully_shard`
    device_cache_threshold: float = 0.9  # part of device memory for cached shards; see :func:`fcdp.fully_shard`
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
        meta = build_meta_model(config, dtype=dtype)
        router_loss = find_router_loss(meta, options.router_loss)
        stack = StreamedModel(meta, torch.device("cpu"))
        source = CheckpointSource(checkpoint, meta) if checkpoint else RandomSource(meta, options.seed)
        source.check()
        module: Any = build_meta_model(config, dtype=dtype)
        if peft_config is not None:
            if getattr(peft_config, "trainable_token_indices", None):  # peft reads a weight past FSDP2's hooks
                raise UserError(
                    "trainable_token_indices cannot be trained with sharded weights: name the embeddings in "
                    "modules_to_save, or train on one machine."
                )
            options.towers.without_adapters(peft_config, module)
        adapters = None if peft_config is None else Adapters(module, peft_config, options.seed, saved=saved)
        # peft computes with these without calling them: earlier, FSDP2 took a group's forward pass as unfinished then.
        is_earlier = TorchVersion(torch.__version__) < "2.13"
        if is_earlier and any(isinstance(each, ParamWrapper) for each in module.modules()):
            raise UserError(f"Adapters of experts over several ranks need PyTorch 2.13; this is {torch.__version__}.")
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
            config, checkpoint, meta, stack.family, stack.block_prefix, module, adapters, source, dtype, router_loss
        )

    @property
    def stored(self) -> CheckpointSource | None:
        return self.source if isinstance(self.source, CheckpointSource) else None

    @property
    def sharding(self) -> Sharding:
        return sharding(self.module)

    def load(self) -> None:
        load(self.module, self.source, self.adapters)

    def trained(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the parameters that the optimizer changes: all that are not frozen, or with adapters these."""
        for name, parameter in self.module.named_parameters():
            if parameter.requires_grad:
                yield name, parameter

    def model_flops_per_token(self, seq_len: int) -> float:
        """Return 6 FLOPs per parameter and token, 4 per frozen one, plus attention's; recomputation is not counted."""
        return model_flops_per_token(self.meta, seq_len) + self._adapter_flops

    def hardware_flops_per_token(self, seq_len: int) -> float:
        """Return the FLOPs per token with the recomputed forward pass, where there is one."""
        recomputed = self.module.supports_gradient_checkpointing
        count = hardware_flops_per_token if recomputed else model_flops_per_token
        return count(self.meta, seq_len) + self._adapter_flops

    @property
    def _adapter_flops(self) -> float:
        """FLOPs per token beyond those of training all weights: adapters' own, less the gradients of frozen weights."""
        if self.adapters is None:
            return 0.0
        trainable = sum(parameter.numel() for _, parameter in self.trained())
        return 6.0 * trainable - 2.0 * active_parameters(self.meta, self.meta)

    def export(self, directory: Path, merge: bool, allow_nonfinite: bool, is_rank0: bool) -> None:
        """Write what was trained; see :meth:`fcdp.trainer.Trainer.save_pretrained`. Collective."""

        def write(folder: Path, blocks: Iterator[dict[str, torch.Tensor]], unties: bool = False) -> None:
            writer = None
            if is_rank0:
                writer = CheckpointWriter(
                    folder, self.meta, self.config, self.dtype, _SHARD_BYTES, allow_nonfinite, self.stored, unties
                )
            for named in blocks:
                if writer is not None:
                    writer.add(named)
            broadcast_from_rank0(lambda: None if writer is None else writer.finish())

        self.sharding.reshard()
        adapters = self.adapters
        if adapters is None:
            write(directory, gather_blocks(self.module, self.block_prefix, self.dtype))
            return
        if merge:  # first: if it is refused, the adapters of before stay, too
            blocks = gather_blocks(self.module, self.block_prefix, None, adapters.merge_group)
            on_cpu = ({name: value.cpu() for name, value in named.items()} for named in blocks)
            write(directory / MERGED, (adapters.merge(named) if is_rank0 else {} for named in on_cpu), adapters.unties)
        values = {name: whole(parameter).cpu() for name, parameter in self.trained()}
        broadcast_from_rank0(lambda: adapters.save(directory, values, allow_nonfinite, self.checkpoint))
