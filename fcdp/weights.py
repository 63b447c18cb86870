"""Weights into a sharded model, each rank its own rows; and out of it, a block at a time.

FSDP2 cuts every parameter along its first dimension into as many equal parts as there are shards, so a rank's part is a
range of rows. Where a tensor on disk is the parameter, each rank reads its range through PyTorch's distributed reader
of Hugging Face checkpoints. What has to be put together first (fused experts, other layouts) and random weights are
made one parameter or module at a time on every rank, of which the rank keeps its rows.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import cast

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from common.models.shards import read_header
from common.models.sources import CheckpointSource, WeightSource


def widen(model: nn.Module) -> None:
    """Turn the parameters of a model on the meta device into fp32 ones, the masters, tied ones staying tied. Buffers
    stay as they are."""
    wide: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.is_floating_point():
                if id(parameter) not in wide:
                    value = torch.empty_like(parameter, dtype=torch.float32)
                    wide[id(parameter)] = nn.Parameter(value, requires_grad=parameter.requires_grad)
                setattr(module, name, wide[id(parameter)])


def materialise(model: nn.Module, device: torch.device) -> None:
    """Give the shards of a model on the meta device memory on ``device``, uninitialised. Buffers keep their values."""
    buffers = [(module, name, value) for module in model.modules() for name, value in module._buffers.items()]
    for module, name, _ in buffers:
        module._buffers[name] = None
    model.to_empty(device=device)
    for module, name, value in buffers:
        module._buffers[name] = None if value is None else value.to(device)


def load(model: nn.Module, source: WeightSource) -> None:
    """Fill the shards of ``model`` from ``source``. Collective.

    Args:
        model: sharded and materialised.
        source: of the same model, made from a copy of it that is not sharded. It has been checked.
    """
    shards = {name: cast(DTensor, parameter) for name, parameter in model.named_parameters()}
    direct = _direct_names(source, list(shards)) if isinstance(source, CheckpointSource) else {}
    if direct and isinstance(source, CheckpointSource):
        wanted = {stored: shards[name].detach() for name, stored in direct.items()}
        dcp.load(wanted, storage_reader=HuggingFaceStorageReader(str(source.shards.directory)))
    with torch.no_grad():
        for name, value in source.read([name for name in shards if name not in direct]):
            start, stop = row_range(shards[name])
            shards[name].to_local().copy_(value[start:stop])
    for name, value in source.read_buffers():
        model.get_buffer(name).copy_(value)


def row_range(parameter: DTensor) -> tuple[int, int]:
    """The rows of a parameter sharded by FSDP2 that this rank holds: the last dimension of the mesh shards."""
    mesh = parameter.device_mesh
    rows = parameter.shape[0]
    part = -(-rows // mesh.size(mesh.ndim - 1))
    start = min(rows, part * mesh.get_local_rank(mesh.ndim - 1))
    return start, min(rows, start + part)


def gather_blocks(model: PreTrainedModel, prefix: str, dtype: torch.dtype) -> Iterator[dict[str, torch.Tensor]]:
    """All parameters in ``dtype``, those of one block at a time, then those outside blocks one by one. Collective:
    every rank iterates to the end, and gets all.

    Args:
        prefix: name of the model's list of blocks.
    """
    together: dict[str, list[str]] = {}
    for name, _ in model.named_parameters():
        inside = name.startswith(f"{prefix}.")
        unit = name.removeprefix(f"{prefix}.").partition(".")[0] if inside else name
        together.setdefault(f"block {unit}" if inside else unit, []).append(name)
    for names in together.values():
        yield {name: _whole(model.get_parameter(name), dtype) for name in names}


def _whole(parameter: nn.Parameter, dtype: torch.dtype) -> torch.Tensor:
    return cast(DTensor, parameter.detach().to(dtype)).full_tensor()


def _direct_names(source: CheckpointSource, names: list[str]) -> dict[str, str]:
    """Name on disk of each parameter that is one tensor there, as it is."""
    files = {stored.file for stored in source.shards.tensors.values()}
    # The distributed reader takes all safetensors files of a folder for one checkpoint: what a file that the index does
    # not know holds, too, is read the other way.
    others = [file for file in Path(source.shards.directory).glob("*.safetensors") if file not in files]
    twice = {name for file in others for name in read_header(file)}
    found = {name: source.stored_as(name) for name in names}
    return {name: stored for name, stored in found.items() if stored is not None and stored not in twice}
