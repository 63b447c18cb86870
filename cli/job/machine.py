"""The machine of a run, and the run as the planner of out-of-core training sees it."""

import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from transformers import PreTrainedConfig

from cli.options.objectives import OBJECTIVES
from cli.options.option import naming
from cli.options.settings import Settings
from common.errors import UserError
from common.hardware.machine import pick_gpu, torch_name
from common.models.checkpoint.random_source import classifier_config
from common.models.checkpoint.shards import has_weights
from common.models.presets import load_config
from common.models.task_type import TaskType, task_type_of
from common.store.directories import usable_directories
from fuyou.config import AUTO, EngineConfig
from fuyou.engine.common_decisions import fastest_dtype
from fuyou.planner import RunPlan, TrainingJob
from fuyou.planner.training_job import job_of_run, open_model
from fuyou.runtime.device import memory_limits, open_device

REWARD = ("reward",)  # Names of a reward model's classes: a single one, which is a number
# Classes that are assumed where no data say it, for a plan: their number changes next to nothing
_CLASSES = 2
DEFAULT_SEQ_LEN = 1024
ELSEWHERE = "meta"  # Device of hardware that is not in this machine


def device_name(gpu: str) -> str:
    """Return PyTorch's name of what ``--gpu`` names."""
    return torch_name(pick_gpu(gpu))


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
        print(
            f"Only a plan: --seq-len {requested} is longer than the model's context of {context}.",
            file=sys.stderr,
        )
    elif requested > context:
        raise UserError(
            f"--seq-len {requested} is longer than the model's context of {context} tokens: give --seq-len {context}, "
            "or raise max_position_embeddings in its config.json, with the rope_parameters that this takes."
        )
    return requested


def planned_config(name: str, objective: str, config: PreTrainedConfig) -> PreTrainedConfig:
    """Return the configuration to plan for: the model's, or a classifier's in its place, without looking at data.

    Raises:
        UserError: the objective needs a head that the model cannot have.
    """
    task = task_type_of(config)
    if not (OBJECTIVES[objective].classifies and task.generates):
        return config
    if task is TaskType.IMAGE_TEXT_TO_TEXT:
        raise UserError(
            f"{name} is {task.value}, and --objective {objective} puts its head on a model of text alone: give a "
            "causal language model."
        )
    classes = REWARD if objective == "reward" else [str(number) for number in range(_CLASSES)]
    return classifier_config(config, classes, None)


def job_at_hand(settings: Settings, device: str) -> TrainingJob:
    """Return the run that a command plans for, or measures, and does not start, with a dtype instead of ``auto``."""
    traits = settings.traits
    engine = settings.engine.with_options(padded=traits.classifies)
    if engine.dtype == AUTO:
        engine = engine.with_options(dtype=fastest_dtype(device))
    with naming("--model"):
        config, checkpoint = load_config(settings.model)
    seq_len = sequence_length(settings.seq_len, config, only_planned=settings.drive is not None)
    planned = planned_config(settings.model, settings.objective, config)
    if planned is not config:
        checkpoint = None  # which has no head for classes
    model = open_model(engine, planned, checkpoint, torch.device("cpu"), draw=False)
    job = job_of_run(settings.model, engine, model, settings.batch_size * traits.rows, seq_len, {})
    if checkpoint is not None and not has_weights(checkpoint):
        job = replace(job, reads_rows=None)
    # Which the engine does not take before it has its drives
    return replace(job, drive_life=settings.drive_life)


def plan_at_hand(settings: Settings, device: str, directories: Sequence[Path]) -> RunPlan:
    """Return the plan of this run on this machine."""
    return plan_of(job_at_hand(settings, device), settings.engine, device, directories)


def plan_of(
    job: TrainingJob, engine: EngineConfig, device: str, directories: Sequence[Path], ranks_per_node: int = 1
) -> RunPlan:
    """Return the plan of a job on this machine, within the budgets that the options give."""
    opened = open_device(device)
    memory = engine.memory
    limits = memory_limits(opened, memory.host_memory, memory.device_memory, ranks_per_node)
    return RunPlan(job, opened, limits, directories)
