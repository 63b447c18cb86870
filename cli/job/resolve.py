"""From settings to a job: everything that can be wrong is found before anything slow begins."""

import math
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import torch

from cli.job.data import RANDOM_TOKENS, DataSource
from cli.job.inputs import check_apart, check_whole
from cli.job.job import Job
from cli.job.machine import plan_of
from cli.job.model import ChatTemplate, ModelChoice, unplaced_weights
from cli.job.outputs import Outputs, check_outside
from cli.job.resumed import EarlierRun, check_same_options, fixed_options
from cli.job.strategy import check_strategy
from cli.job.throughput import gpu_or_plan
from cli.options.schedule import LearningRate
from cli.options.settings import Settings
from common.data.images import ImageBatches
from common.data.selection import RecordSelection
from common.errors import UserError
from common.files import make_directory
from common.hardware.machine import torch_name
from common.models.adapters.adapted_model import AdaptedModel
from common.models.checkpoint.companions import doubt_about
from common.models.checkpoint.watched import WatchedFiles
from common.store.directories import usable_directories
from common.units import format_bytes
from fuyou.config import AUTO, EngineConfig
from fuyou.engine.common_decisions import fastest_dtype, stored_manifest
from fuyou.layout.share import Share
from fuyou.model.family import family_of
from fuyou.model.open_model import OpenModel
from fuyou.planner import RunPlan, TrainingJob
from fuyou.planner.training_job import adapted_as, job_of_run, open_model

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
    engine = settings.engine
    if settings.steps is not None:
        settings.warmup.steps(settings.steps)
    earlier = EarlierRun.of(settings)
    fixed = fixed_options(settings)
    if settings.resume and settings.nodes is None:  # several nodes say together which one lacks what
        check_same_options(earlier.options, fixed)
    template = ChatTemplate.named(settings.chat_template, earlier.day(settings.resume))

    # The machine.
    gpu = gpu_or_plan(settings.gpu, settings.arguments, settings.drives)
    device = torch_name(gpu)
    if engine.dtype == AUTO:
        engine = engine.with_options(dtype=(settings.resume and earlier.dtype) or fastest_dtype(device))

    # The model and the data, looked up.
    choice, source = _named(settings, template)
    ssd = _directories(settings, bool(settings.resume) or is_restart)
    outputs = Outputs.read(settings.output_directory) if claim is None else claim()
    run_name = settings.store_name
    engine = engine.with_options(
        ssd=ssd,
        leave_ssd=settings.drives_to_leave,
        run_name=run_name,
        resume=settings.resume,
        overwrite=settings.overwrite,
        drive_life=settings.drive_life,
        device=device,
        padded=settings.traits.classifies,
    )

    # The model, opened.
    tokenizer = None if source.is_random else choice.load_tokenizer()
    if tokenizer is not None:
        warnings += filter(None, [doubt_about(tokenizer, choice.companions.tokenizer)])
    if tokenizer is not None and choice.lacks_head:
        choice = choice.with_head(source.class_names(), tokenizer, outputs)
    model = _opened(settings, engine, choice, device)
    unplaced = "" if settings.resume else unplaced_weights(model)  # a run's weights are on its drives
    if settings.host_memory is not None or settings.device_memory is not None:
        rows = settings.batch_size * settings.traits.rows
        plan = _plan(settings, engine, model, device, rows, choice.seq_len)[1]
        _ = plan and plan.memory  # budgets that are too small come out before the data are read

    # The data, opened.
    family = family_of(model.base)
    held_out = None
    if tokenizer is None:
        batches = source.random(choice, family)
        data_key = RANDOM_TOKENS
    else:
        batches, data_key, held_out = source.open(choice, family, tokenizer)
    total = settings.steps
    if total is None:
        passes = (settings.epochs or 1) * batches.rows / settings.batch_size
        total = max(1, math.ceil(passes - 1e-9)) if source.sets else DEFAULT_STEPS
    rate = LearningRate(
        settings.schedule, settings.highest_lr, settings.warmup.steps(total), total, settings.min_lr
    )

    # The plan.
    seq_len = getattr(batches, "seq_len", choice.seq_len)
    rows = settings.batch_size * batches.rows_per_item
    images = isinstance(batches, ImageBatches) or isinstance(held_out, ImageBatches)
    engine = engine.with_options(
        batch_shape=(rows, seq_len),
        packed=batches.packed,
        images=images,
        padded=images or settings.traits.classifies,
    )
    training, plan = _plan(settings, engine, model, device, rows, seq_len)
    job = Job(
        settings=settings,
        engine=engine,
        choice=choice,
        model=model,
        training=training,
        plan=plan,
        watched=watched,
        warnings=warnings,
        unplaced=unplaced,
        batches=batches,
        held_out=held_out,
        data_key=data_key,
        tokenizer=tokenizer,
        seq_len=seq_len,
        learning_rate=rate,
        gpu=gpu,
        outputs=outputs,
        ssd=ssd,
        run_name=run_name,
        is_there=earlier.commit is not None,
        fixed=fixed,
    )
    if settings.save and not (settings.resume or settings.overwrite):
        # Only the store knows how much it replaces
        _check_space(job)
    return job


def _opened(settings: Settings, engine: EngineConfig, choice: ModelChoice, device: str) -> AdaptedModel:
    """Return the model of the run: in parts, where it is trained out of core."""
    if settings.in_memory:
        return AdaptedModel(
            choice.config,
            engine.precision.dtype,
            **adapted_as(engine),
            checkpoint=choice.checkpoint,
            draw=False,
        )
    # Ranks open it again on their devices, when they have met.
    is_alone = settings.nodes is None
    computing = torch.device(device if is_alone else "cpu")
    return open_model(engine, choice.config, choice.checkpoint, computing, draw=is_alone)


def _plan(
    settings: Settings, engine: EngineConfig, model: AdaptedModel, device: str, rows: int, seq_len: int
) -> tuple[TrainingJob | None, RunPlan | None]:
    """Return the run as the planner sees it, and its plan, if it is one of a single machine."""
    if not isinstance(model, OpenModel):
        return None, None
    stored = stored_manifest(engine.store.everywhere) if engine.store.resume else {}
    training = job_of_run(settings.model, engine, model, rows, seq_len, stored)
    if settings.nodes is not None:
        return training.among(Share(settings.nodes, settings.gpus_per_node or 1)), None
    return training, plan_of(training, engine, device, engine.store.drives)


def _named(settings: Settings, template: ChatTemplate) -> tuple[ModelChoice, DataSource]:
    """Return the model and the data that the options name, which are there."""
    objective = settings.objective
    output = settings.output_directory
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
        held_out_option="--data" if settings.command == "evaluate" else "--eval-data",
    )


def _directories(settings: Settings, resumes: bool) -> tuple[Path, ...]:
    """Make the output directory, and return the drives' directories."""
    output = settings.output_directory
    check_apart(settings, output, () if resumes else settings.drives, resumes=resumes)
    if not resumes:
        check_outside(output)
    _make_directory(output)
    Outputs.read(output).check_for(settings, resumes=resumes)
    return tuple(usable_directories(settings.drives)) if settings.ssd else (output,)


def _make_directory(output: Path) -> None:
    try:
        make_directory(output)
    except OSError as error:
        raise UserError(f"--output: the directory {output} cannot be created: {error.strerror}.") from error
    if not os.access(output, os.R_OK | os.W_OK | os.X_OK):
        raise UserError(
            f"--output: {output} is not writable. Change its owner or mode, or choose another path."
        )


def _check_space(job: Job) -> None:
    whole = job.parameters * (2 if job.engine.dtype == "bf16" else 4)
    each = whole if job.model.adapters is None else 4 * job.model.trained_parameters
    checkpoint = each
    if job.settings.save_every is not None:  # the newest, one more while that is written, and the best
        regular = min(job.settings.keep, (job.steps - 1) // job.settings.save_every)
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
    commits = ssd[0] / settings.store_name
    has_commit = earlier.commit is not None
    if has_commit and not (settings.resume or settings.overwrite):
        raise UserError(
            f"{commits} holds a run already: add --resume to continue it, --overwrite to replace it, or give "
            "another --output."
        )
