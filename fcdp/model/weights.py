"""Loading weights into a sharded model, each rank its own rows, and gathering them from it, a block at a time.

FSDP2 cuts every parameter along its first dimension into equal parts, so a rank's part is a range of rows. Where a
tensor on disk is the parameter, each rank reads its range alone. Parameters that are assembled first, random weights,
and adapters are made whole on every rank, one at a time."""

from collections.abc import Callable, Iterator
from typing import cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from common.models.adapters.adapters import Adapters
from common.models.checkpoint.sources import CheckpointSource, WeightSource


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


def row_range(parameter: DTensor) -> tuple[int, int]:
    """Return the rows that this rank holds of a parameter sharded by FSDP2, along the last dimension of its mesh."""
    mesh = parameter.device_mesh
    rows = parameter.shape[0]
    part = -(-rows // mesh.size(mesh.ndim - 1))
    start = min(rows, part * mesh.get_local_rank(mesh.ndim - 1))
    return start, min(rows, start + part)


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
