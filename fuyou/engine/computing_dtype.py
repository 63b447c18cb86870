"""``dtype="auto"``: a run computes in what its device multiplies fastest, and continues in what it began with."""

import functools
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from common.errors import FinetuneError
from common.store import load_manifest
from fuyou.checkpoint.run_files import rank_folder
from fuyou.layout.record import DTYPES

RANK_FOLDERS = rank_folder("*")
_SIDE = 384  # Side of the multiplied matrices: 113 MFLOP, long enough not to measure the call alone
_ROUNDS = 20  # Enough for one in which no other process was in the way


def stored_dtype(directories: Iterable[Path]) -> str | None:
    """Return the dtype of the run whose manifest lies in one of ``directories``, or in a rank's folder there.

    None if there is no manifest that can be read: the one that opens the run says what is wrong with it.
    """
    names = {str(dtype): name for name, dtype in DTYPES.items()}
    return next((names[one["dtype"]] for one in _manifests(directories) if one.get("dtype") in names), None)


def stored_micro_batch(directories: Iterable[Path]) -> list[int] | None:
    """Return :attr:`fuyou.checkpoint.commits.TrainingState.micro_batch` of that run, too."""
    return next((one["micro_batch"] for one in _manifests(directories) if one.get("micro_batch")), None)


def _manifests(directories: Iterable[Path]) -> Iterator[dict[str, Any]]:
    for directory in chain.from_iterable((path, *sorted(path.glob(RANK_FOLDERS))) for path in directories):
        with suppress(FinetuneError, OSError):
            content = load_manifest(directory)
            if content is not None:
                yield content


def dtype_of_all(stored: str | None, device: str, all_gather_object: Callable[[Any], Any]) -> str:
    """Return the dtype that all ranks compute in: what any has stored, else what is fastest on rank 0's device.

    Collective, as ``all_gather_object`` is. A node may have joined without a store.
    """
    of_all = all_gather_object((stored, fastest_dtype(device)))
    return next((one for one, _ in of_all if one is not None), of_all[0][1])


@functools.cache
def fastest_dtype(device: str) -> str:
    """Return the name of the dtype in which a device multiplies faster; of equals bf16, half as large.

    A CPU without AMX or AVX512-BF16 multiplies bf16 at a fifth of fp32's rate or less, one with AMX at eight times. It
    is measured rather than read off the processor's flags: libraries and virtual machines do not use all that flags
    promise. The best of several alternating rounds, which other processes do not change by factors. Where nothing is
    computed (a meta device, hardware that is only planned for) it is bf16, as on every GPU since 2020.

    Args:
        device: name of a ``torch.device``.
    """
    if device.startswith("cuda"):
        return "bf16" if torch.cuda.get_device_capability(device) >= (8, 0) else "fp32"
    if device != "cpu":
        return "bf16"
    seconds = dict.fromkeys(DTYPES, float("inf"))
    ones = {name: torch.ones(_SIDE, _SIDE, dtype=dtype) for name, dtype in DTYPES.items()}
    for _ in range(_ROUNDS):
        for name, matrix in ones.items():
            start_time = time.perf_counter()
            torch.mm(matrix, matrix)
            seconds[name] = min(seconds[name], time.perf_counter() - start_time)
    return "bf16" if seconds["bf16"] <= seconds["fp32"] else "fp32"
