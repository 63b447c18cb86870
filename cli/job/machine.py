"""What is measured and planned for: this machine's device and drives, and the training that would run on them."""

import math
from pathlib import Path

from transformers import PreTrainedConfig

from cli.job.head import planned_config
from cli.options.adapters import peft_config_of, towers_of
from cli.options.option import naming
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
        UserError: if there is no such device.
    """
    return open_device(torch_name(pick_gpu(gpu)))


def directories_at_hand(settings: Settings) -> list[Path]:
    """Return directories on the drives that a run would use; ``--output`` need not be there yet.

    Raises:
        UserError: if a directory of ``--ssd`` does not exist or cannot be used.
    """
    output = settings.output_directory
    existing = next(path for path in (output, *output.parents) if path.is_dir())
    return usable_directories([Path(word).expanduser() for word in settings.ssd] or [existing])


def sequence_length(requested: int | None, config: PreTrainedConfig) -> int:
    """Return the tokens per sequence, from ``--seq-len`` or by default.

    Raises:
        UserError: if it is longer than the model's context.
    """
    context = getattr(config.get_text_config(), "max_position_embeddings", None) or math.inf
    if requested is None:
        return int(min(DEFAULT_SEQ_LEN, context))
    if requested > context:
        raise UserError(
            f"--seq-len {requested} is longer than the model's context of {context} tokens: give --seq-len {context}, "
            "or raise max_position_embeddings in its config.json, with the rope_parameters that this takes."
        )
    return requested


def precision_of(settings: Settings) -> Precision:
    return Precision.named(settings.dtype, settings.optimizer_dtype, settings.optimizer)


def training_of(settings: Settings) -> TrainingJob:
    """Describe a run for the planner, without looking at weights.

    Raises:
        UserError: if there is no such model, or it cannot be trained this way.
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
        commit_every=settings.commit_interval,
        drive_life=settings.drive_life,
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
