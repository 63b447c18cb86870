"""What all ranks of a run must decide alike before it begins: dtype, budgets, whether the proof holds."""

from collections.abc import Sequence
from pathlib import Path

from transformers import PreTrainedConfig

from common.activity import activity
from common.errors import UserError
from common.hardware.machine import memory_available_bytes
from common.units import format_bytes
from fuyou.config import AUTO, EngineConfig
from fuyou.engine.computing_dtype import dtype_of_all, stored_dtype
from fuyou.preflight.preflight import prove
from fuyou.runtime.devices.device import Device, memory_limits
from fuyou.runtime.ranks.agreement import Agreement
from fuyou.runtime.ranks.topology import share_of


def with_common_dtype(
    config: EngineConfig, device: Device, ssd: Sequence[Path], agreement: Agreement | None
) -> EngineConfig:
    """Return ``config`` with a dtype in the place of ``"auto"``: what a resumed run began with, else what suits the
    device."""
    if config.dtype != AUTO:
        return config
    store = config.store
    continued = [*store.folders, *store.folders_to_leave, *ssd] if store.resume else []
    kind = device.torch_device.type if device.computes else "meta"
    gather = (lambda value: [value]) if agreement is None else agreement.all_gather_object
    return config.with_options(dtype=dtype_of_all(stored_dtype(continued), kind, gather))


def common_limits(config: EngineConfig, device: Device, agreement: Agreement | None) -> tuple[int, int]:
    """Return the smallest budgets of host and device memory of all ranks, in bytes.

    The ranks must plan alike, for their collectives to match.
    """
    memory, ranks = config.memory, share_of(config.topology).ranks_per_node
    limits = memory_limits(device, memory.host_memory, memory.device_memory, ranks)
    if agreement is None:
        return limits
    hosts, devices = zip(*agreement.all_gather_object(limits), strict=True)
    return min(hosts), min(devices)


def prove_once(config: EngineConfig, model: PreTrainedConfig, agreement: Agreement | None) -> None:
    """See on rank 0 that a family can be trained out of core, and let all ranks know.

    Raises:
        UserError: it cannot.
    """
    refusal = None
    if share_of(config.topology).rank == 0:
        try:
            with activity("proving on a small model that this family trains out of core as in memory"):
                prove(
                    model,
                    adapters=config.adapters,
                    trainable=config.trainable,
                    packed=config.packed,
                    router_loss=config.router_loss,
                    dtype=config.precision.dtype,
                )
        except UserError as error:
            refusal = error
    if agreement is not None:
        message = agreement.all_gather_object(None if refusal is None else refusal.as_written)[0]
        refusal = refusal or (None if message is None else UserError(message))
    if refusal is not None:
        raise refusal


def check_memory(host_bytes: int, ranks_per_node: int, agreement: Agreement | None) -> None:
    """Compare what all ranks of this machine are going to take with what there is, before any of them takes it.

    Args:
        host_bytes: that each rank is going to take of host memory.
        ranks_per_node: number of ranks on this machine.
        agreement: with the other ranks, if there are any.

    Raises:
        UserError: it is not there.
    """
    available = memory_available_bytes()
    if agreement is not None:  # when all have looked: they stop together, or none does
        available = min(agreement.all_gather_object(available))
    needed = host_bytes * ranks_per_node
    if needed > available:
        among = f" ({ranks_per_node} ranks with {format_bytes(host_bytes)} each)" if ranks_per_node > 1 else ""
        raise UserError(
            f"This run would take {format_bytes(needed)} of host memory{among}, and {format_bytes(available)} are "
            "available (other programs and control groups counted): the system would end it on the way. Lower "
            "--host-memory, or end what takes the memory."
        )
