"""Exporting a sharded model: a Hugging Face checkpoint, or adapters of PEFT."""

from collections.abc import Iterator
from pathlib import Path

import torch

from common.communication import broadcast_from_rank0
from common.models.adapters.adapters import MERGED, Adapters
from common.models.checkpoint.export import CheckpointWriter
from fcdp.model.model import ClusterModel
from fcdp.model.weights import gather_blocks, whole

_SHARD_BYTES = 2_000_000_000  # largest shard of an exported checkpoint. Rank 0 holds one.


def export(model: ClusterModel, directory: Path, *, merge: bool, allow_nonfinite: bool, is_rank0: bool) -> None:
    """Write what was trained; see :meth:`fcdp.trainer.Trainer.save_pretrained`. Collective."""

    def write(folder: Path, blocks: Iterator[dict[str, torch.Tensor]], unties: bool = False) -> None:
        writer = None
        if is_rank0:
            writer = CheckpointWriter(
                folder, model.meta, model.config, model.dtype, _SHARD_BYTES, allow_nonfinite, model.stored, unties
            )
        for named in blocks:
            if writer is not None:
                writer.add(named)
        broadcast_from_rank0(lambda: None if writer is None else writer.finish())

    model.sharding.reshard()
    adapters = model.adapters
    if adapters is None:
        write(directory, gather_blocks(model.module, model.block_prefix, model.dtype))
        return
    if merge:  # first: if it is refused, the adapters of before stay, too
        write(directory / MERGED, _merged(model, adapters, is_rank0), adapters.unties)
    values = {name: whole(parameter).cpu() for name, parameter in model.trained()}
    broadcast_from_rank0(lambda: adapters.save(directory, values, allow_nonfinite, model.checkpoint))


def _merged(model: ClusterModel, adapters: Adapters, is_rank0: bool) -> Iterator[dict[str, torch.Tensor]]:
    """Yield weights with their adapters added on the first rank, which writes them, and nothing on others."""
    for named in gather_blocks(model.module, model.block_prefix, None, adapters.merge_group):
        yield adapters.merge({name: value.cpu() for name, value in named.items()}) if is_rank0 else {}
