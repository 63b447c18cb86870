"""From settings to a job: everything that can be wrong is found before anything slow begins."""

import math
import os
import shutil
from dataclasses import replace
from pathlib import Path

from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from cli.job.data import DataSource, chat_template_named, class_names, tokenizer_of, write_chat_template
from cli.job.job import Job, Setup
from cli.job.machine import REWARD, planned_config, sequence_length, trainable_parameters, with_dtype
from cli.job.resumed import check_there_is_one, committed, template_date
from cli.job.strategy import check_strategy
from cli.options.option import naming
from cli.options.schedule import LearningRate
from cli.options.settings import Settings
from common.data import Batches
from common.data.files import find_files
from common.errors import UserError
from common.hardware.machine import pick_gpu
from common.models.adapters.options import CONFIG
from common.models.checkpoint.random_source import classifier_config, write_with_new_head
from common.models.checkpoint.sources import CheckpointSource
from common.models.meta_model import build_meta_model
from common.models.presets import load_config
from common.models.task_type import TaskType, task_type_of
from common.store.directories import DirectoryLock, usable_directories
from common.units import format_bytes
from fuyou.model.family import family_of

FOLDER = "base"  # Folder inside the output directory with the language model as a classifier, before training


def check_head(settings: Settings, config: PreTrainedConfig) -> None:
    """See whether the model's head is one that the objective can train, or a new one can be had in its place."""
    task, objective = task_type_of(config), settings.objective
    if task is TaskType.SEQUENCE_CLASSIFICATION and settings.traits.classifies:
        is_reward = config.num_labels == 1
        if is_reward is not (objective == "reward"):
            kind = "a reward model" if is_reward else f"a classifier of {config.num_labels} classes"
            other = "reward" if is_reward else "classify"
            raise UserError(f"{settings.model} is {kind}: give --objective {other}, or the language model.")
        return
    if not task.generates:
        raise UserError(
            f"{settings.model} is {task.value}, and --objective {objective} trains models that write text: "
            + (
                "add --objective classify or reward."
                if task is TaskType.SEQUENCE_CLASSIFICATION
                else "use fuyou.Engine, whose batches take its labels."
            )
        )
    if settings.traits.classifies:
        _ = planned_config(settings, config)


def with_head(setup: Setup, tokenizer: PreTrainedTokenizerBase) -> Setup:
    """Return the setup with the checkpoint to train: its own, or one with a new head in the output directory."""
    settings, config = setup.settings, setup.config
    if setup.checkpoint is None or not settings.traits.classifies or not task_type_of(config).generates:
        return setup
    known = config.pad_token_id, tokenizer.pad_token_id, tokenizer.eos_token_id
    pad = next((int(token) for token in known if token is not None), 0)
    names = REWARD if settings.objective == "reward" else class_names(settings)
    new_config = classifier_config(config, names, pad)
    with DirectoryLock([setup.output], patience=math.inf):  # of several ranks on a machine, the first one makes it
        base = write_with_new_head(setup.checkpoint, new_config, setup.output / FOLDER, settings.seed)
        write_chat_template(settings, base)
    return replace(setup, checkpoint=base, config=load_config(base)[0])


DEFAULT_STEPS = 10  # Steps of a run without data: enough to see a steady rate


def check(settings: Settings) -> Setup:
    """Check the settings within a few seconds, and make the output directory."""
    if settings.chat_template is not None:
        chat_template_named(settings.chat_template)
    if settings.steps is not None:
        settings.warmup.steps(settings.steps)
    commit = committed(settings) if settings.resume else None
    day = template_date(commit)
    check_there_is_one(settings, commit)
    with naming("--model"):
        config, checkpoint = load_config(settings.model)
    seq_len = sequence_length(settings.seq_len, config)
    check_head(settings, config)
    _ = settings.engine.adapters
    gpu = pick_gpu(settings.gpu)
    for option, sets in (("--data", settings.data_sets), ("--eval-data", [(settings.eval_data, None)])):
        for files, _ in sets:
            with naming(option):
                find_files(files)
    ssd, output = _directories(settings, checkpoint)
    return Setup(
        settings=settings,
        config=config,
        checkpoint=checkpoint,
        gpu=gpu,
        output=output,
        ssd=ssd,
        run_name=settings.store_name,
        seq_len=seq_len,
        template_date=day,
    )


def resolve(settings: Settings) -> Job:
    """Check the settings and open what the run needs; data that were not tokenized before are tokenized here."""
    return _open(check(settings))


def _open(setup: Setup) -> Job:
    """Open the model and the data of a run that was checked."""
    settings = with_dtype(setup.settings)
    setup = replace(setup, settings=settings)
    if settings.nodes is None and (settings.host_memory is not None or settings.device_memory is not None):
        _ = setup.context.memory  # budgets that are too small come out before the data are read
    tokenizer = None
    if settings.data or settings.eval_data:
        tokenizer = tokenizer_of(settings, setup.checkpoint, setup.template_date)
        setup = with_head(setup, tokenizer)
    model = build_meta_model(setup.config)
    if setup.checkpoint is not None and not settings.resume:  # whose weights are on the drives
        CheckpointSource(setup.checkpoint, model).check()
    parameters = sum(parameter.numel() for parameter in model.parameters())
    adapter_parameters, frozen_parameters = 0, 0
    if settings.trains_adapters:
        adapter_parameters = trainable_parameters(settings, model)
    else:
        frozen_parameters = sum(model.get_parameter(name).numel() for name in settings.engine.towers.frozen(model))
    task_type, vocab_size = task_type_of(model.config), setup.config.get_text_config().vocab_size
    data = DataSource(setup, tokenizer, task_type, family_of(model))
    batches, data_key = data.batches(vocab_size)
    setup = replace(setup, seq_len=getattr(batches, "seq_len", setup.seq_len))
    total = _total_steps(settings, batches)
    rate = LearningRate(settings.schedule, settings.highest_lr, settings.warmup.steps(total), total, settings.min_lr)
    job = Job(
        **(setup.known | ({"template_date": None} if tokenizer is None else {})),
        architecture=type(model).__name__,
        vocab_size=vocab_size,
        parameters=parameters,
        batches=batches,
        data_key=data_key,
        learning_rate=rate,
        adapter_parameters=adapter_parameters,
        held_out=data.held_out(),
        frozen_parameters=frozen_parameters,
        task_type=task_type,
    )
    if settings.save:
        _check_space(job)
    return job


def _directories(settings: Settings, checkpoint: Path | None) -> tuple[tuple[Path, ...], Path]:
    output = settings.output_directory
    if checkpoint is not None and checkpoint.resolve() == output.resolve():
        raise UserError(f"--output {output} is the checkpoint that is to be read: give another directory.")
    if settings.adapter is not None and settings.adapter.expanduser().resolve() == output.resolve():
        raise UserError(f"--output {output} is the --adapter that is to be read: give another directory.")
    _make_directory("--output", output)
    result, what = (CONFIG, "adapters") if settings.trains_adapters else ("config.json", "a checkpoint")
    if settings.save and (output / result).exists() and not (settings.resume or settings.overwrite):
        raise UserError(
            f"{output} holds {what} already: give another --output, or add --overwrite to replace it "
            "(or --resume to continue the run that made it)."
        )
    return tuple(usable_directories(settings.drives)) if settings.ssd else (output,), output


def _make_directory(option: str, path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{option}: the directory {path} cannot be created: {error.strerror}.") from error
    if not os.access(path, os.R_OK | os.W_OK | os.X_OK):
        raise UserError(f"{option}: {path} is not writable. Change its owner or mode, or choose another path.")


def _total_steps(settings: Settings, batches: Batches) -> int:
    if settings.steps is not None:
        return settings.steps
    if not settings.data:
        return DEFAULT_STEPS
    return max(1, math.ceil((settings.epochs or 1) * batches.rows / settings.batch_size - 1e-9))


def _check_space(job: Job) -> None:
    settings = job.settings
    if settings.resume or settings.overwrite:
        return  # what is there will be replaced: its space counts, and only the store knows how much that is
    whole = job.parameters * (2 if settings.dtype == "bf16" else 4)
    each = 4 * job.adapter_parameters if settings.trains_adapters else whole
    checkpoint = each
    if settings.save_every is not None:  # the newest, one more while that is written, and the best
        regular = min(settings.keep, (job.steps - 1) // settings.save_every)
        checkpoint += each * (regular + (job.held_out is not None))
    drive = job.output.stat().st_dev
    sharing = sum(path.stat().st_dev == drive for path in job.ssd)
    store = job.store_bytes * sharing // len(job.ssd)
    free = shutil.disk_usage(job.output).free
    if checkpoint + store > free:
        parts = f"{format_bytes(checkpoint)} for checkpoints" + (
            f", {format_bytes(store)} for the store" if store else ""
        )
        raise UserError(
            f"Too little space in {job.output}: {checkpoint + store:,} bytes needed ({parts}), {free:,} bytes free "
            f"({format_bytes(free)}). Nothing was written. Give --output (or --ssd) on a larger drive, "
            "or --no-save if no checkpoint is wanted."
        )


def check_start(settings: Settings, ranks_per_node: int) -> None:
    """Check a run on several ranks as far as this node can tell."""
    ranks = ranks_per_node * (settings.nodes or 1)
    if settings.batch_size < ranks:
        raise UserError(
            f"--batch-size {settings.batch_size} is less than one sequence for each of {ranks} ranks "
            f"({settings.nodes} x {ranks_per_node})."
        )
    check_strategy(settings, ranks_per_node)
    checked = check(settings)
    commits, has_commit = checked.ssd[0] / checked.run_name, committed(settings) is not None
    if has_commit and not (settings.resume or settings.overwrite):
        raise UserError(
            f"{commits} holds a run already: add --resume to continue it, --overwrite to replace it, or give "
            "another --output."
        )
    if settings.resume and not has_commit and not settings.ssd:  # with --ssd, the ranks find which node lacks what
        raise UserError(f"--resume: there is no commit in {commits}. Leave it out to begin.")
