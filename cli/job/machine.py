"""What is measured and planned for: this machine's device and drives, and the training that would run on them."""

import math
from pathlib import Path

from transformers import PreTrainedConfig

from cli.job.head import planned_config
from cli.options.adapters import peft_config_of, towers_of
from cli.options.naming import naming
from cli.options.settings import Settings
from common.errors import UserError
from common.hardware.machine import pick_gpu, torch_name
from common.models.presets import load_config
from common.store.directories import usable_directories
from fuyou.layout.frozen_weights import FrozenDtype
from fuyou.layout.record import Precision
from fuyou.optimizer.clipping import ClipStatistics, clip_by_named
from fuyou.planner import TrainingJob, describe_training
from fuyou.runtime.devices.device import Device, open_device
from fuyou.schedule.batch import LossInputs

DEFAULT_SEQ_LEN = 1024


def device_at_hand(gpu: str) -> Device:
    """Open the device that ``--gpu`` names.

    Raises:
        UserError: there is no such device here.
    """
    return open_device(torch_name(pick_gpu(gpu)))


def directories_at_hand(settings: Settings) -> list[Path]:
    """Return directories on the drives that a run would use; ``--output`` need not be there yet.

    Raises:
        UserError: a directory of ``--ssd`` is not there, or cannot be used.
    """
    return usable_directories(
        [Path(word).expanduser() for word in settings.ssd] or [_existing(settings.output_directory)]
    )


def sequence_length(wanted: int | None, config: PreTrainedConfig) -> int:
    """Return the tokens per sequence, as asked for with ``--seq-len`` or by default.

    Raises:
        UserError: longer than the model's context.
    """
    context = getattr(config.get_text_config(), "max_position_embeddings", None) or math.inf
    if wanted is None:
        return int(min(DEFAULT_SEQ_LEN, context))
    if wanted > context:
        raise UserError(f"--seq-len {wanted} is longer than the model's context of {context} tokens.")
    return wanted


def precision_of(settings: Settings) -> Precision:
    """Return the dtypes of computing and of what the optimizer keeps."""
    return Precision.named(settings.dtype, settings.optimizer_dtype, settings.optimizer)


def training_of(settings: Settings) -> TrainingJob:
    """Describe a run for the planner, without looking at weights.

    Raises:
        UserError: no such model, or one that cannot be trained so.
    """
    with naming("--model"):
        config, _ = load_config(settings.model)
    waits = settings.max_grad_norm > 0 or settings.on_nonfinite == "skip"
    return describe_training(
        planned_config(settings, config) if settings.traits.classifies else settings.model,
        settings.batch_size * settings.traits.rows,
        sequence_length(settings.seq_len, config),
        precision=precision_of(settings),
        clips=waits,
        direct_reads=settings.io == "kvikio",
        micro_batch=settings.micro_batch,
        host_cache=settings.host_cache,
        piece_bytes=settings.piece_size,
        adapters=peft_config_of(settings),
        frozen=FrozenDtype.named(settings.frozen_dtype),
        towers=towers_of(settings),
        router_loss=settings.router_loss,
        compiled=settings.compile,
        commit_every=settings.commit_interval,
        clip_by=clip_by_named(settings.clip_by),
        clipped_share=_clip_statistics(settings).share if settings.max_grad_norm > 0 else 0.0,
        loss=LossInputs(settings.traits.outputs),
        padded=settings.traits.classifies,
    )


def _clip_statistics(settings: Settings) -> ClipStatistics:
    if not settings.resume:
        return ClipStatistics()
    drives = [Path(word).expanduser() for word in settings.ssd] or [settings.output_directory]
    return ClipStatistics.of_run(drive / settings.store_name for drive in drives)


def _existing(directory: Path) -> Path:
    return next(path for path in (directory, *directory.parents) if path.is_dir())
