"""Evaluate a model on data, and merge adapters into a model: no training, and no store that stays."""

import shutil
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from cli.job.resolve import resolve
from cli.options.settings import Settings
from cli.train.engine_trainer import EngineTrainer
from common.activity import activity
from common.errors import UserError
from common.hardware.machine import memory_available_bytes, pick_gpu, torch_name
from common.models.adapters.options import SavedAdapter
from common.models.checkpoint.export import CHAT_TEMPLATE
from common.models.checkpoint.sources import WeightSource
from common.models.meta_model import build_meta_model
from common.models.presets import load_config
from common.store.directories import DirectoryLock
from fuyou import Engine
from fuyou.checkpoint.export import StoreExporter
from fuyou.config import AUTO
from fuyou.engine.common_decisions import fastest_dtype
from fuyou.layout.frozen_weights import FrozenDtype
from fuyou.layout.record import Precision, Record
from fuyou.model.open_model import OpenModel


def run_evaluate(settings: Settings) -> None:
    """Print the loss of a model, with its ``--adapter``, on all of the data; weights are streamed from the drives."""
    with ExitStack() as stack:
        drives = [stack.enter_context(TemporaryDirectory(prefix="evaluate-", dir=path)) for path in settings.ssd or "."]
        trained: dict[str, Any] = {
            "data": (),
            "eval_data": settings.data,
            "save": False,
            "steps": 1,
            "output": Path(drives[0]),
        }
        with activity("preparing the model and the data", announced=True):
            job = resolve(replace(settings, ssd=(), **trained))
        config = job.engine.with_options(ssd=drives)
        if not job.adapters:  # something has to be trainable, and costs least if it is small
            parameters = dict(build_meta_model(job.config).named_parameters())
            smallest = min(parameters, key=lambda name: parameters[name].numel())
            config = config.with_options(trainable=[smallest])
        with activity("writing the weights to the drives", announced=True):
            engine = stack.enter_context(Engine(job.checkpoint or job.model, config))  # type: ignore[call-arg] # the config has ssd
        assert job.held_out is not None
        with activity("evaluating", announced=True):
            result = EngineTrainer(job, engine).evaluate(job.held_out)
        print(f"data     {job.held_out.description}\neval     {result}", flush=True)
        job.close()


@dataclass(frozen=True)
class _AdaptedWeights:
    """Reads the weights of a checkpoint and of saved adapters, where a run reads those of its store."""

    source: WeightSource

    def block_weights(self, records: Sequence[Record]) -> dict[str, torch.Tensor]:
        return dict(self.source.read([slot.name for record in records for slot in record.parameters]))


def merge_adapter(settings: Settings) -> None:
    """Write the checkpoint of ``--model`` with ``--adapter`` merged into it to ``--output``, block by block."""
    if not settings.model:
        raise UserError("Give the model that --adapter was made for: finetune export --model DIR --adapter DIR.")
    output = settings.output_directory
    config, checkpoint = load_config(settings.model)
    if checkpoint is None or settings.adapter is None:
        raise UserError(f"{settings.model} is a preset of random weights: give the model that --adapter was made for.")
    if (output / "config.json").exists() and not settings.overwrite:
        raise UserError(f"{output} holds a checkpoint already: give another --output, or add --overwrite.")
    dtype = fastest_dtype(torch_name(pick_gpu(settings.gpu))) if settings.dtype == AUTO else settings.dtype
    saved, precision = SavedAdapter(settings.adapter), Precision.named(dtype)
    with activity(f"writing the checkpoint to {output}", announced=True):
        device, plain = torch.device("cpu"), FrozenDtype.PLAIN
        model = OpenModel(config, precision, device, saved.config(), frozen=plain, checkpoint=checkpoint, saved=saved)
        reader: Any = _AdaptedWeights(model.weights())
        output.mkdir(parents=True, exist_ok=True)
        with DirectoryLock([output]):
            exporter = StoreExporter(model, reader, model.shape, checkpoint, memory_available_bytes() // 2)
            exporter.checkpoint(output, precision.dtype)
            template = settings.adapter.expanduser() / CHAT_TEMPLATE
            if template.is_file():  # that of training
                shutil.copyfile(template, output / CHAT_TEMPLATE)
    print(f"saved    {output}, for {model.task_type.auto_class}.from_pretrained", flush=True)
