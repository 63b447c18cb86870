"""What all ranks of a run must decide alike before it begins: dtype, budgets, whether the proof holds."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig

from common.activity import activity
from common.errors import UserError
from common.hardware.machine import memory_available_bytes
from common.store import first_manifest
from common.store.folders import run_places
from common.store.kvikio_backend import BOUNCE_BYTES
from common.store.store import IO_THREADS
from common.units import format_bytes
from fuyou.config import AUTO, EngineConfig
from fuyou.layout.record import DTYPES
from fuyou.preflight.proof import prove, prove_divided
from fuyou.runtime.device import Device, memory_limits
from fuyou.runtime.ranks import Agreement


def stored_dtype(directories: Iterable[Path]) -> str | None:
    """Return the dtype of the run that is in ``directories``; None if there is no manifest that can be read."""
    names = {str(dtype): name for name, dtype in DTYPES.items()}
    return names.get(str(stored_manifest(directories).get("dtype")))


def stored_manifest(directories: Iterable[Path]) -> dict[str, Any]:
    """Return the manifest of the run that is in ``directories``, or in any of its places there.

    Empty if there is none that can be read: opening the run says what is wrong with it.
    """
    return first_manifest(run_places(directories))


def dtype_of_all(stored: str | None, device: str, all_gather_object: Callable[[Any], Any]) -> str:
    """Return the dtype that all ranks compute in: what any has stored, else what is fastest on rank 0's device.

    Collective, as ``all_gather_object`` is. A node may have joined without a store.
    """
    of_all = all_gather_object((stored, fastest_dtype(device)))
    return next((dtype for dtype, _ in of_all if dtype is not None), of_all[0][1])


def fastest_dtype(device: str) -> str:
    """Return the name of the dtype in which a device multiplies faster.

    A CPU without AMX multiplies bf16 at fp32's rate or less, one with it at eight times. Where nothing is computed (a
    meta device, hardware that is only planned for) it is bf16, as on every GPU since 2020.

    Args:
        device: name of a ``torch.device``.
    """
    if device.startswith("cuda"):
        return "bf16" if torch.cuda.get_device_capability(device) >= (8, 0) else "fp32"
    if device == "cpu":
        return "bf16" if "amx_bf16" in Path("/proc/cpuinfo").read_text().split() else "fp32"
    return "bf16"


def with_common_dtype(config: EngineConfig, device: Device, agreement: Agreement) -> EngineConfig:
    """Return ``config`` with a dtype instead of ``"auto"``: what a resumed run began with, else what suits the
    device."""
    if config.dtype != AUTO:
        return config
    stored = stored_dtype(config.store.everywhere)
    name = str(device.torch_device)
    return config.with_options(dtype=dtype_of_all(stored, name, agreement.all_gather_object))


def check_io(config: EngineConfig, device: Device) -> None:
    """Raise a UserError if kvikio is to read into the memory of a device that is no GPU."""
    if config.store.direct_reads and device.torch_device.type != "cuda":
        raise UserError(
            f"--io kvikio reads into a GPU's memory, and this run computes on {device.name}: leave it out."
        )


def common_limits(config: EngineConfig, device: Device, agreement: Agreement) -> tuple[int, int]:
    """Return the smallest budgets of host and device memory of all ranks, in bytes.

    The ranks must plan alike, for their collectives to match.
    """
    memory = config.memory
    host, on_device = memory_limits(
        device, memory.host_memory, memory.device_memory, agreement.share.ranks_per_node
    )
    if config.store.direct_reads:
        host -= BOUNCE_BYTES * IO_THREADS * len(config.store.folders)
    hosts, devices = zip(*agreement.all_gather_object((host, on_device)), strict=True)
    return min(hosts), min(devices)


def prove_once(
    config: EngineConfig,
    model: PreTrainedConfig,
    agreement: Agreement,
    *,
    pieces: bool = False,
    chunks: bool = False,
) -> None:
    """See on rank 0 that a family can be trained out of core, or with blocks in ``pieces``, or rows in ``chunks``, and
    let all ranks know.

    Raises:
        UserError: it cannot.
    """
    refusal = None
    weights: dict[str, Any] = {
        "adapters": config.adapters,
        "trainable": config.trainable,
        "router_loss": config.router_loss,
    }
    if agreement.share.rank == 0:
        try:
            with activity("proving on a small model that this family trains out of core as in memory"):
                if pieces or chunks:
                    prove_divided(model, chunks=chunks, packed=chunks and config.packed, **weights)
                else:
                    prove(model, packed=config.packed, dtype=config.precision.dtype, **weights)
        except UserError as error:
            refusal = error
    message = agreement.all_gather_object(None if refusal is None else refusal.as_written)[0]
    refusal = refusal or (None if message is None else UserError(message))
    if refusal is not None:
        raise refusal


def check_memory(host_bytes: int, agreement: Agreement) -> None:
    """Compare what all ranks of this machine are going to take with what there is, before any of them takes it.

    Args:
        host_bytes: that each rank is going to take of host memory.
        agreement: with the other ranks.

    Raises:
        UserError: it is not there.
    """
    available = min(agreement.all_gather_object(memory_available_bytes()))  # they stop together, or none does
    ranks_per_node = agreement.share.ranks_per_node
    needed = host_bytes * ranks_per_node
    if needed > available:
        among = (
            f" ({ranks_per_node} ranks with {format_bytes(host_bytes)} each)" if ranks_per_node > 1 else ""
        )
        raise UserError(
            f"This run would take {format_bytes(needed)} of host memory{among}, and {format_bytes(available)} are "
            "available (other programs and control groups counted): the system would end it on the way. Lower "
            "--host-memory, or end what takes the memory."
        )
