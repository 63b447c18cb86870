"""The machine and the adapters of a run: device, drives, dtype, and the training that a planner simulates."""

import contextlib
import copy
import math
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel

from cli.options.option import naming
from cli.options.settings import COMMITS, Settings
from common.errors import FinetuneError, UserError
from common.hardware.machine import pick_gpu, torch_name
from common.models.adapters.adapters import Adapters
from common.models.checkpoint.random_source import classifier_config
from common.models.presets import load_config
from common.models.task_type import task_type_of
from common.store.directories import usable_directories
from fuyou.config import AUTO
from fuyou.engine.common_decisions import dtype_of_all, fastest_dtype, stored_dtype
from fuyou.optimizer.clipping import ClipStatistics
from fuyou.planner import TrainingJob, describe_training
from fuyou.planner.training_job import planned_options
from fuyou.runtime.device import Device, open_device

REWARD = ("reward",)  # Names of a reward model's classes: a single one, which is a number
_CLASSES = 2  # Classes that are assumed where no data say it, for a plan: their number changes next to nothing
DEFAULT_SEQ_LEN = 1024


def device_at_hand(gpu: str) -> Device:
    return open_device(torch_name(pick_gpu(gpu)))


def directories_at_hand(settings: Settings, writable: bool = True) -> list[Path]:
    """Return ``writable`` directories on the drives that a run would use; ``--output`` need not be there yet."""
    output = settings.output_directory
    existing = next(path for path in (output, *output.parents) if path.is_dir())
    return usable_directories(settings.drives or [existing], writable)


def sequence_length(requested: int | None, config: PreTrainedConfig, *, only_planned: bool = False) -> int:
    """Return the tokens per sequence, from ``--seq-len`` or by default.

    If it is longer than the model's context, raise a UserError, or print a warning where it is ``only_planned``.
    """
    context = getattr(config.get_text_config(), "max_position_embeddings", None) or math.inf
    if requested is None:
        return int(min(DEFAULT_SEQ_LEN, context))
    if requested > context and only_planned:
        print(f"Only a plan: --seq-len {requested} is longer than the model's context of {context}.", file=sys.stderr)
    elif requested > context:
        raise UserError(
            f"--seq-len {requested} is longer than the model's context of {context} tokens: give --seq-len {context}, "
            "or raise max_position_embeddings in its config.json, with the rope_parameters that this takes."
        )
    return requested


def planned_config(settings: Settings, config: PreTrainedConfig) -> PreTrainedConfig:
    """Return the configuration of what is trained, as far as it is known without data."""
    if not settings.traits.classifies or not task_type_of(config).generates:
        return config
    classes = REWARD if settings.objective == "reward" else [str(number) for number in range(_CLASSES)]
    return classifier_config(config, classes, None)


def training_of(settings: Settings) -> TrainingJob:
    """Describe a run for the planner, without looking at weights."""
    with naming("--model"):
        config, _ = load_config(settings.model)
    engine, clips = settings.engine, settings.max_grad_norm > 0
    share = ClipStatistics.of_run(settings.stores if settings.resume else ()).share if clips else 0.0
    return describe_training(
        planned_config(settings, config) if settings.traits.classifies else settings.model,
        settings.batch_size * settings.traits.rows,
        sequence_length(settings.seq_len, config, only_planned=settings.drive is not None),
        precision=engine.precision,
        adapters=copy.deepcopy(engine.adapters),  # which a model's own rules change
        frozen=engine.frozen_dtype,
        towers=engine.towers,
        router_loss=settings.router_loss,
        padded=settings.traits.classifies,
        clipped_share=share,
        **planned_options(engine) | {"drive_life": settings.drive_life},
    )


ELSEWHERE = "meta"  # Device of hardware that is not in this machine


def with_dtype(settings: Settings, device: str | None = None) -> Settings:
    """Return ``settings`` with a dtype instead of ``auto``: that of the resumed run, else the fastest of ``device``, or
    of what ``--gpu`` names here."""
    if settings.dtype != AUTO:
        return settings
    stored = _stored(settings) if settings.resume else None
    return replace(settings, dtype=stored or fastest_dtype(device or _device_at_hand(settings.gpu)))


def with_dtype_of_all(settings: Settings, device: str, restarted: bool) -> Settings:
    """Return ``settings`` with a dtype instead of ``auto``, the same on every rank; collective. Ranks that were
    ``restarted`` continue in that of what they left."""
    from common.communication import all_gather_object

    if settings.dtype != AUTO:
        return settings
    stored = _stored(settings) if settings.resume or restarted else None
    return replace(settings, dtype=dtype_of_all(stored, device, all_gather_object))


def _stored(settings: Settings) -> str | None:
    if settings.nodes is None or settings.ssd:
        return stored_dtype(settings.stores)
    saved = (newest_commit(settings) or {}).get("--dtype")
    return saved if isinstance(saved, str) else None


def newest_commit(settings: Settings) -> Mapping[str, Any] | None:
    """Return the newest commit of several ranks in memory; None without any, empty if it is damaged."""
    from fcdp.checkpoint import ShardedCheckpoints

    commits = ShardedCheckpoints(settings.output_directory / COMMITS)
    with contextlib.suppress(FinetuneError, OSError):  # the one that opens it says what is wrong
        newest = commits.newest()
        return None if newest is None else commits.describe(newest)
    return {}


def _device_at_hand(gpu: str) -> str:
    try:
        return torch_name(pick_gpu(gpu))
    except UserError:  # said with more to go by where the device is opened
        return ELSEWHERE


def trainable_parameters(settings: Settings, model: PreTrainedModel) -> int:
    """Count the numbers that are trained once ``model`` has its adapters. It is on the meta device, and is changed."""
    engine, config = settings.engine, copy.deepcopy(settings.engine.adapters)
    assert config is not None
    engine.towers.without_adapters(config, model)
    names = Adapters(model, config, settings.seed, draw=False, saved=engine.saved_adapter).trainable_names
    return sum(model.get_parameter(name).numel() for name in names)
