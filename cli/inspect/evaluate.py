"""Evaluate a model on data, and merge adapters into a model: no training, and no store that stays."""

import math
import os
import shlex
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from cli.job.claim import claim
from cli.job.inputs import check_apart, check_whole
from cli.job.outputs import RESULT, Outputs
from cli.job.resolve import resolve
from cli.options.command import parse_command_line
from cli.options.option import naming
from cli.options.run_record import CONFIG, DESCRIPTION, REPLACED, RUN
from cli.options.settings import Settings, settings_of
from cli.report.results import EvaluationResult
from cli.train.engine_trainer import EngineTrainer, frozen_engine
from common.activity import activity
from common.errors import FinetuneError, UserError, printable
from common.files import copy_into, make_directory
from common.hardware.machine import memory_available_bytes, pick_gpu, torch_name
from common.models.adapters.options import SavedAdapter
from common.models.checkpoint.companions import Companions
from common.models.checkpoint.compressed.formats import method_of
from common.models.checkpoint.shards import rounding
from common.models.checkpoint.sources import WeightSource
from common.models.checkpoint.watched import WatchedFiles
from common.models.generation import FILE as GENERATION
from common.models.presets import load_config
from common.models.task_type import TaskType, task_type_of
from common.scratch import scratch_folder
from fuyou.checkpoint.export import StoreExporter
from fuyou.config import AUTO
from fuyou.engine.common_decisions import fastest_dtype
from fuyou.layout.frozen_weights import FrozenDtype
from fuyou.layout.record import Precision, Record
from fuyou.model.open_model import OpenModel


def run_evaluate(settings: Settings) -> None:
    """Print the loss of a model, with its ``--adapter``, on all of the data; weights are streamed from the drives."""
    described, result = _evaluated(settings)
    print(f"data     {described}\neval     {result}", flush=True)


def _evaluated(settings: Settings, warns: bool = True) -> tuple[str, EvaluationResult]:
    """Return a description of the data, and the loss on all of it; a store is on the drives until then."""
    settings = replace(settings, objective=_objective(settings.model))
    parents = settings.drives or [Path()]
    check_apart(settings, None, parents)
    if unwritable := [parent for parent in parents if not os.access(parent, os.W_OK)]:
        raise UserError(
            f"{unwritable[0].absolute()} cannot be written to, and the weights are streamed from files there: "
            "name another directory with --ssd."
        )
    with ExitStack() as stack:
        drives = [stack.enter_context(scratch_folder(parent)) for parent in parents]
        trained: dict[str, Any] = {
            "data": (),
            "eval_data": settings.data,
            "save": False,
            "steps": 1,
            "output": drives[0],
        }
        with activity("preparing the model and the data", announced=True):
            job = resolve(replace(settings, ssd=(), **trained))
        if warns:
            _warn(job.warnings, job.engine.saved_adapter, job.checkpoint, job.engine.dtype)
        with activity("writing the weights to the drives", announced=True):
            engine = stack.enter_context(frozen_engine(job, drives))
        assert job.held_out is not None
        with activity("evaluating", announced=True):
            result = EngineTrainer(job, engine).evaluate(job.held_out)
        if not math.isfinite(result.loss):
            raise FinetuneError(
                f"The loss is {result.loss}: a weight of {settings.model} or of its adapter is not finite, or "
                f"{job.engine.dtype} is too narrow for this model."
            )
        described = printable(job.held_out.description).replace("\n", "\n         ")
        job.close()
    return described, result


def _objective(model: str) -> str:
    """Return the objective that a model's head is for."""
    with naming("--model"):
        config, _ = load_config(model)
    if task_type_of(config) is not TaskType.SEQUENCE_CLASSIFICATION:
        return "sft"
    return "reward" if config.num_labels == 1 else "classify"


def _warn(warnings: Sequence[str], saved: SavedAdapter | None, checkpoint: Path | None, dtype: str) -> None:
    """Print the warnings, whether adapters were trained on other weights, and whether weights are rounded."""
    for warning in filter(None, [*warnings, "" if saved is None else saved.warning(checkpoint)]):
        print(f"warning  {printable(warning)}", flush=True)
    if checkpoint is not None and method_of(checkpoint) is None and (rounded := rounding(checkpoint, dtype)):
        print(f"weights  {rounded}", flush=True)


@dataclass(frozen=True)
class _AdaptedWeights:
    """Reads the weights of a checkpoint and of saved adapters, where a run reads those of its store."""

    source: WeightSource

    def block_weights(self, records: Sequence[Record]) -> dict[str, torch.Tensor]:
        return dict(self.source.read([slot.name for record in records for slot in record.parameters]))


def merge_adapter(settings: Settings) -> None:
    """Write the checkpoint of ``--model`` with ``--adapter`` merged into it to ``--output``, block by block."""
    if not settings.model:
        raise UserError(
            "Give the model that --adapter was made for: finetune export --model DIR --adapter DIR."
        )
    if settings.ssd:
        raise UserError(
            "--ssd names the drives of a run, and --adapter is merged into --model without any: leave it out."
        )
    output = settings.output_directory
    check_apart(settings, output)
    _refuse_run(output, output)
    Outputs.read(output).check_for(settings, resumes=False)
    watched = WatchedFiles(settings.model, settings.adapter)
    warnings = check_whole(settings)
    config, checkpoint = load_config(settings.model)
    if checkpoint is None or settings.adapter is None:
        raise UserError(
            f"{settings.model} is a preset of random weights: give the model that --adapter was made for."
        )
    dtype = fastest_dtype(torch_name(pick_gpu(settings.gpu))) if settings.dtype == AUTO else settings.dtype
    saved = SavedAdapter(settings.adapter)
    precision = Precision.named(dtype)
    _warn(warnings, saved, checkpoint, dtype)
    make_directory(output)
    evaluation = _evaluation(settings, checkpoint, dtype)
    before = "" if evaluation is None else _measured(evaluation, bool(settings.eval_data))
    with activity(f"writing the checkpoint to {output}", announced=True):
        device = torch.device("cpu")
        plain = FrozenDtype.PLAIN
        model = OpenModel(
            config, precision, device, saved.config(), frozen=plain, checkpoint=checkpoint, saved=saved
        )
        reader: Any = _AdaptedWeights(model.weights)
        with claim(settings) as outputs:
            outputs.command = _command(settings, dtype)
            _refuse_run(output / REPLACED, output)  # one that has begun since; it is put back
            folder = outputs.prepare(RESULT)
            exporter = StoreExporter(model, reader, model.layout, checkpoint, memory_available_bytes() // 2)
            exporter.checkpoint(folder, precision.dtype)
            Companions(checkpoint, saved.directory).write(folder)
            if (file := saved.directory / GENERATION).is_file():  # that of training
                copy_into(folder, file)
            watched.check()
            outputs.put(RESULT)
            outputs.begin()
    print(f"saved    {output}, for {model.task_type.auto_class}.from_pretrained", flush=True)
    if evaluation is not None:
        after = _measured(replace(evaluation, model=str(output), adapter=None), bool(settings.eval_data))
        print(f"data     {', '.join(evaluation.data)}\nbefore   {before}\nafter    {after}", flush=True)
    elif (method := method_of(checkpoint)) is not None:
        print(
            f"loss     not compared: the weights were {method.name}, and are {dtype} with the adapters added. For the "
            f"loss before, finetune evaluate {shlex.join(_read(settings))} --data FILE; for that after, "
            f"finetune evaluate --model {shlex.quote(str(output))} --data FILE",
            flush=True,
        )


def _measured(evaluation: Settings, is_wanted: bool) -> str:
    """Return the loss in words; unless it ``is_wanted``, also why it cannot be computed: a merge needs none."""
    try:
        return str(_evaluated(evaluation, warns=False)[1])
    except (FinetuneError, OSError) as error:
        if is_wanted:
            raise
        return f"not computed: {error}"


def _evaluation(settings: Settings, checkpoint: Path, dtype: str) -> Settings | None:
    """Return how to evaluate ``--model`` with ``--adapter``: on ``--eval-data``, or as the run that trained the
    adapters did if the checkpoint is compressed; None if no data are known."""
    assert settings.adapter is not None
    config = settings.adapter.expanduser() / RUN / CONFIG
    words = ["evaluate"]
    data = settings.eval_data
    if config.is_file() and (data or method_of(checkpoint) is not None):
        trained = parse_command_line(["train", "--config", str(config)]).params
        is_comparable = trained["objective"] == _objective(settings.model)
        words += ["--config", str(config)] if is_comparable else []
        there = is_comparable and all(Path(file).exists() for file in trained["eval_data"])
        data = data or (trained["eval_data"] if there else ())
    if not data:
        return None
    # Not inside the output, which is read as the model later.
    words += ["--ssd", str(settings.output_directory.parent), "--dtype", dtype, "--data", *data]
    words += ["--model", settings.model, "--adapter", str(settings.adapter)]
    return settings_of("evaluate", parse_command_line(words), tuple(words))


def _command(settings: Settings, dtype: str) -> list[str]:
    """Return the command that writes the same again, from any directory."""
    written = ["--output", str(settings.output_directory.absolute()), "--dtype", dtype]
    return ["finetune", "export", *_read(settings), *written]


def _read(settings: Settings) -> list[str]:
    """Return the options that name what is merged, from any directory."""
    model = Path(settings.model).expanduser()
    named = {
        "--model": model.absolute() if model.exists() else settings.model,
        "--adapter": Path(settings.adapter or "").expanduser().absolute(),
    }
    return [str(word) for pair in named.items() for word in pair]


def _refuse_run(folder: Path, output: Path) -> None:
    if (folder / RUN / DESCRIPTION).exists():
        raise UserError(f"{output} holds a run: give another --output.")
