"""``dtype="auto"``: a run computes in what its device multiplies fastest, and continues in what it began with."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from common.store import first_manifest
from fuyou.checkpoint.run_files import run_places
from fuyou.layout.record import DTYPES


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
    return next((one for one, _ in of_all if one is not None), of_all[0][1])


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
