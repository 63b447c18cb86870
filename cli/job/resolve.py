"""From settings to a job: everything that can be wrong is found before anything slow begins."""

import math
import os
import shutil
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

from cli.job.data import RANDOM_TOKENS, DataSource
from cli.job.inputs import check_apart, check_whole
from cli.job.job import Job
from cli.job.machine import PlannedRun
from cli.job.model import ChatTemplate, ModelChoice, adapters_of_run
from cli.job.outputs import Outputs, check_outside
from cli.job.resumed import EarlierRun, fixed_options
from cli.job.strategy import check_strategy
from cli.job.throughput import gpu_or_plan
from cli.options.all_options import ClusterSettings, OutputSettings
from cli.options.schedule import LearningRate
from cli.options.settings import Settings
from common.data.images import ImageBatches
from common.data.selection import RecordSelection
from common.errors import UserError
from common.files import make_directory
from common.hardware.machine import torch_name
from common.models.checkpoint.watched import WatchedFiles
from common.models.meta_model import build_meta_model
from common.store.directories import usable_directories
from common.units import format_bytes
from fuyou.config import AUTO
from fuyou.engine.common_decisions import fastest_dtype
from fuyou.model.family import family_of

DEFAULT_STEPS = 10  # Steps of a run without data: enough to see a steady rate


def resolve(settings: Settings, claim: Callable[[], Outputs] | None = None, is_restart: bool = False) -> Job:
    """Check the settings and open what the run needs; data that were not tokenized before are tokenized here.

    Args:
        settings: of the run.
        claim: makes the output directory that of the run, once it was checked; None: others have done that.
        is_restart: whether this is the same run again, as a rank was lost.
    """
    watched = WatchedFiles(settings.model, settings.adapter)
    warnings = [] if settings.resume else check_whole(settings)
    # The options, and the run that they continue.
    engine, output = settings.engine, settings.output_directory
    if settings.steps is not None:
        settings.warmup.steps(settings.steps)
    earlier, fixed = EarlierRun.of(settings), fixed_options(settings)
    if settings.resume and settings.nodes is None:  # several nodes say together which one lacks what
        earlier.check(fixed)
    template = ChatTemplate.named(settings.chat_template, earlier.day(settings.resume))

    # The machine.
    gpu = gpu_or_plan(settings.gpu, settings.arguments, settings.drives)
    device = torch_name(gpu)
    if engine.dtype == AUTO:
        engine = engine.with_options(dtype=(settings.resume and earlier.dtype) or fastest_dtype(device))

    # The model and the data, looked up.
    choice, source = _named(settings, template)
    ssd = _directories(settings, bool(settings.resume) or is_restart)
    outputs = Outputs.read(output) if claim is None else claim()
    planned = PlannedRun(
        choice.to_plan,
        settings.batch_size * settings.traits.rows,
        choice.seq_len,
        engine,
        settings.drive_life,
        settings.traits.classifies,
        device,
        ssd,
    )
    if settings.nodes is None and (settings.host_memory is not None or settings.device_memory is not None):
        _ = planned.context.memory  # budgets that are too small come out before the data are read

    # The model and the data, opened.
    tokenizer = None if source.is_random else choice.load_tokenizer()
    if tokenizer is not None and choice.lacks_head:
        choice = choice.with_head(source.class_names(), tokenizer, outputs)
    model = build_meta_model(choice.config, checkpoint=choice.checkpoint)
    unplaced = "" if settings.resume else choice.check_weights(model)  # a run's weights are on its drives
    family, held_out = family_of(model), None
    if tokenizer is None:
        batches, data_key = source.random(choice, family), RANDOM_TOKENS
    else:
        batches, data_key, held_out = source.open(choice, family, tokenizer)
    seq_len, rows = getattr(batches, "seq_len", choice.seq_len), settings.batch_size * batches.rows_per_item
    total = settings.steps
    if total is None:
        passes = (settings.epochs or 1) * batches.rows / settings.batch_size
        total = max(1, math.ceil(passes - 1e-9)) if source.sets else DEFAULT_STEPS
    rate = LearningRate(settings.schedule, settings.highest_lr, settings.warmup.steps(total), total, settings.min_lr)

    # The plan.
    images = isinstance(batches, ImageBatches) or isinstance(held_out, ImageBatches)
    engine = engine.with_options(
        ssd=ssd,
        leave_ssd=settings.drives_to_leave,
        run_name=settings.store_name,
        resume=settings.resume,
        overwrite=settings.overwrite,
        drive_life=settings.drive_life,
        device=device,
        batch_shape=(rows, seq_len),
        packed=batches.packed,
        images=images,
        padded=images or settings.traits.classifies,
    )
    parameters = sum(parameter.numel() for parameter in model.parameters())
    adapters = adapters_of_run(engine, model) if settings.trains_adapters else None
    job = Job(
        **settings.named(
            {item.name for group in (ClusterSettings, OutputSettings) for item in fields(group)} - {"output"}
        ),
        model=settings.model,
        objective=settings.objective,
        batch_size=settings.batch_size,
        cluster=settings.cluster,
        levels=settings.levels,
        resume=settings.resume,
        overwrite=settings.overwrite,
        config=choice.config,
        checkpoint=choice.checkpoint,
        watched=watched,
        warnings=warnings,
        architecture=type(model).__name__,
        task_type=choice.task_type,
        vocab_size=choice.vocab_size,
        parameters=parameters,
        unplaced=unplaced,
        adapters=settings.adapters_in_words,
        adapter_parameters=0 if adapters is None else adapters.trained_count,
        adapted="" if adapters is None else adapters.where,
        objective_options=settings.named(settings.traits.options),
        batches=batches,
        held_out=held_out,
        data_key=data_key,
        tokenizer=tokenizer,
        template=template,
        seq_len=seq_len,
        learning_rate=rate,
        gpu=gpu,
        engine=engine,
        planned=planned,
        in_memory=settings.in_memory,
        output=output,
        outputs=outputs,
        ssd=ssd,
        run_name=settings.store_name,
        is_there=earlier.commit is not None,
        fixed=fixed,
        configuration=settings.configuration(engine.dtype),
        arguments=settings.arguments,
        changes=settings.changes,
        how_to_continue=settings.how_to_continue,
        started_at=settings.started_at,
    )
    if job.save and not (job.resume or job.overwrite):  # what is replaced counts, and only the store knows how much
        _check_space(job)
    return job


def _named(settings: Settings, template: ChatTemplate) -> tuple[ModelChoice, DataSource]:
    """Return the model and the data that the options name, which are there."""
    objective, output = settings.objective, settings.output_directory
    adapter = None if settings.adapter is None else settings.adapter.expanduser()
    choice = ModelChoice(settings.model, objective, settings.seq_len, template, settings.seed, adapter)
    choice.check_head()
    return choice, DataSource(
        sets=settings.data_sets,
        held_out=settings.eval_data,
        selection=RecordSelection(settings.column_of, settings.max_records, settings.eval_split or 0.0),
        objective=objective,
        batch_size=settings.batch_size,
        seed=settings.seed,
        truncate=settings.truncate,
        drop_unseen=settings.drop_unseen,
        template=template,
        output=output,
        shared=settings.nodes is not None,
    )


def _directories(settings: Settings, resumes: bool) -> tuple[Path, ...]:
    """Make the output directory, and return the drives' directories."""
    output = settings.output_directory
    check_apart(settings, output, () if resumes else settings.drives, resumes=resumes)
    if not resumes:
        check_outside(output)
    _make_directory("--output", output)
    Outputs.read(output).check_for(settings, resumes=resumes)
    return tuple(usable_directories(settings.drives)) if settings.ssd else (output,)


def _make_directory(option: str, path: Path) -> None:
    try:
        make_directory(path)
    except OSError as error:
        raise UserError(f"{option}: the directory {path} cannot be created: {error.strerror}.") from error
    if not os.access(path, os.R_OK | os.W_OK | os.X_OK):
        raise UserError(f"{option}: {path} is not writable. Change its owner or mode, or choose another path.")


def _check_space(job: Job) -> None:
    whole = job.parameters * (2 if job.engine.dtype == "bf16" else 4)
    each = 4 * job.adapter_parameters if job.adapters else whole
    checkpoint = each
    if job.save_every is not None:  # the newest, one more while that is written, and the best
        regular = min(job.keep, (job.steps - 1) // job.save_every)
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
    """Check a run on several ranks as far as this node can tell, within a few seconds."""
    ranks = ranks_per_node * (settings.nodes or 1)
    if settings.batch_size < ranks:
        raise UserError(
            f"--batch-size {settings.batch_size} is less than one sequence for each of {ranks} ranks "
            f"({settings.nodes} x {ranks_per_node}): give --batch-size {ranks} or more."
        )
    check_strategy(settings, ranks_per_node)
    earlier = EarlierRun.of(settings)
    _named(settings, ChatTemplate.named(settings.chat_template, earlier.day(settings.resume)))
    ssd = _directories(settings, bool(settings.resume))
    commits, has_commit = ssd[0] / settings.store_name, earlier.commit is not None
    if has_commit and not (settings.resume or settings.overwrite):
        raise UserError(
            f"{commits} holds a run already: add --resume to continue it, --overwrite to replace it, or give "
            "another --output."
        )
