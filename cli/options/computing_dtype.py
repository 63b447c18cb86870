"""``--dtype auto``: decided once, before anything is planned, opened or printed."""

import contextlib
from dataclasses import replace
from pathlib import Path
from typing import Any

from cli.options.settings import COMMITS, Settings
from common.errors import FinetuneError, UserError
from common.hardware.machine import pick_gpu, torch_name
from fuyou.config import AUTO
from fuyou.engine.computing_dtype import dtype_of_all, fastest_dtype, stored_dtype

ELSEWHERE = "meta"
"""Device of hardware that is not in this machine."""


def with_dtype(settings: Settings, device: str | None = None) -> Settings:
    """Return ``settings`` with a dtype instead of ``auto``: that of the resumed run, else the device's fastest.

    Args:
        device: name of the device that will compute; None: what ``--gpu`` names here.
    """
    if settings.dtype != AUTO:
        return settings
    stored = _stored(settings) if settings.resume else None
    return replace(settings, dtype=stored or fastest_dtype(device or _device_at_hand(settings.gpu)))


def with_dtype_of_all(settings: Settings, device: str, restarted: bool) -> Settings:
    """Return ``settings`` with a dtype instead of ``auto``, the same one on every rank of a run; collective.

    Args:
        device: name of this rank's device.
        restarted: whether the ranks have been started again, and resume what they left.
    """
    from common.communication import all_gather_object

    if settings.dtype != AUTO:
        return settings
    stored = _stored(settings) if settings.resume or restarted else None
    return replace(settings, dtype=dtype_of_all(stored, device, all_gather_object))


def _stored(settings: Settings) -> str | None:
    """Return the dtype of the run that is on this node's drives, or in its commits; None if there is none."""
    if settings.nodes is not None and not settings.ssd:
        from fcdp.checkpoint.commits import ShardedCheckpoints

        commits = ShardedCheckpoints(settings.output_directory / COMMITS)
        with contextlib.suppress(FinetuneError, OSError):  # the one that opens it says what is wrong
            newest = commits.newest()
            saved: Any = None if newest is None else commits.describe(newest).get("--dtype")
            return saved if isinstance(saved, str) else None
        return None
    drives = [Path(word).expanduser() for word in (*settings.ssd, *settings.leave_ssd)]
    return stored_dtype(drive / settings.store_name for drive in drives or [settings.output_directory])


def _device_at_hand(gpu: str) -> str:
    try:
        return torch_name(pick_gpu(gpu))
    except UserError:  # said with more to go by where the device is opened
        return ELSEWHERE
