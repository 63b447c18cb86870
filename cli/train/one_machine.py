"""The training loop: a thin user of the engine."""

import contextlib
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from transformers.utils import logging as transformers_logging

from cli.launch.interrupts import Interrupts, Stopped
from cli.options.adapters import peft_config_of, towers_of
from cli.options.settings import Settings
from cli.plan.machine import training_of
from cli.report.progress import StepLine
from cli.report.said import MetricsLogger
from cli.report.summary import Measurements, Report
from cli.train.any_run import check_ids, check_same_run, conclude, measurements, save, say_resumed
from cli.train.evaluation import is_due, look
from cli.train.prepare import Job, prepare, tokenizer_of
from cli.train.sample import continuation, print_sample
from common.data.images.batches import ImageBatches
from common.errors import UserError
from common.store import DirectoryLock
from fuyou import Engine, NonFiniteLoss, StepReport
from fuyou.calibration import profile_or_measure
from fuyou.layout.share import Share
from fuyou.planner import PlannerContext
from fuyou.runtime.devices import memory_limits, open_device

PROFILED_PARAMETERS, PROFILED_STEPS = 100_000_000, 20
"""Runs of smaller models, or of fewer steps, are not worth measuring the machine for."""
PROFILED_HOST_BYTES = 4 << 30
"""Nor are those with less host memory, in which the measurement itself might not fit."""


@dataclass(frozen=True)
class Result:
    """What a run leaves."""

    report: Report
    total_written: int
    """Bytes written to SSD, the making of the store included."""
    output: Path
    store: tuple[Path, ...]


def finetune(settings: Settings, interrupts: Interrupts) -> Result:
    """Run all of it: prepare, train, export, report.

    Raises:
        Stopped: by the user; says how to continue.
        UserError, FinetuneError: with a note on how to continue, if there is something to continue.
    """
    if not settings.debug:
        quiet_transformers()
    job = prepare(settings)
    print(job.header(), flush=True)
    profile_once(job)
    interrupts.how_to_continue = settings.how_to_continue
    _announce_move(job)
    with DirectoryLock([job.output]), _open_engine(job) as engine:
        try:
            result = _train_and_save(job, engine, interrupts)
        except KeyboardInterrupt:
            step = engine.step_count + 1
            engine.close()
            committed = f"step {engine.committed_step} is committed"
            raise Stopped(f"stopped in step {step}; {committed}. {settings.how_to_continue}") from None
        except UserError:
            raise
        except Exception as error:
            engine.close()
            if not isinstance(error, NonFiniteLoss):  # which says so itself
                error.add_note(f"Step {engine.committed_step} is committed.")
            error.add_note(settings.how_to_continue)
            raise
    job.close()
    return result


def quiet_transformers() -> None:
    """What a library thinks worth mentioning would break the progress line."""
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()


def profile_once(job: Job, ranks: Share | None = None) -> None:
    """Measure this machine with this model, so that the engine can plan; where the run is worth the dozen seconds.

    The result is kept: it takes them once.

    Args:
        ranks: all that will run, of which this is one; None: it is alone.
    """
    if job.parameters < PROFILED_PARAMETERS or job.steps < PROFILED_STEPS:
        return
    settings, device, share = job.settings, open_device(job.device), ranks or Share()
    limits = memory_limits(device, settings.host_memory, settings.device_memory, share.ranks_per_node)
    if limits[0] < PROFILED_HOST_BYTES:
        return
    planner_context = PlannerContext(training_of(settings).among(share), device, limits, job.ssd)
    with contextlib.suppress(UserError):  # what does not fit, the engine says with more to go by
        if planner_context.profile is None:
            print("profile  measuring this machine with this model, once", flush=True)
            profile_or_measure(planner_context)


def _announce_move(job: Job) -> None:
    """Copying a run to other drives may take long: say that before."""
    settings = job.settings
    on = [(path / job.run_name).is_dir() for path in job.ssd]
    if settings.resume and (settings.leave_ssd or (any(on) and not all(on))):
        print(f"drives   the run moves to {', '.join(map(str, job.ssd))}, if it is not there: it is copied", flush=True)


def _open_engine(job: Job) -> Engine:
    settings = job.settings
    return Engine(
        **engine_options(job),
        ssd=list(job.ssd),
        leave_ssd=[Path(word).expanduser() for word in settings.leave_ssd],
        device=job.device,
        run_name=job.run_name,
        resume=settings.resume,
        overwrite=settings.overwrite,
        batch_shape=(settings.batch_size, job.seq_len),
        automatic=True,
    )


def engine_options(job: Job) -> dict[str, Any]:
    """Arguments of the engine that are the same whether one rank trains or several."""
    settings = job.settings
    return {
        "model": settings.model if job.checkpoint is None else job.checkpoint,
        "dtype": settings.dtype,
        "optimizer_dtype": settings.optimizer_dtype,
        "lr": settings.lr,
        "betas": (settings.beta1, settings.beta2),
        "eps": settings.eps,
        "weight_decay": settings.weight_decay,
        "max_grad_norm": settings.max_grad_norm or None,
        "on_nonfinite": settings.on_nonfinite,
        "clip_by": settings.clip_by,
        "router_loss": settings.router_loss,
        "micro_batch": settings.micro_batch,
        "host_memory": settings.host_memory,
        "device_memory": settings.device_memory,
        "host_cache": settings.host_cache,
        "seed": settings.seed,
        "commit_every": settings.commit_interval,
        "single_slot": settings.single_slot,
        "prove": not settings.unproven,
        "packed": job.batches.packed,
        "io": settings.io,
        "adapters": peft_config_of(settings),
        "frozen_dtype": settings.frozen_dtype,
        "images": isinstance(job.batches, ImageBatches) or isinstance(job.held_out, ImageBatches),
        "freeze_vision_tower": towers_of(settings).freeze_vision_tower,
        "freeze_multi_modal_projector": towers_of(settings).freeze_multi_modal_projector,
    }


def _train_and_save(job: Job, engine: Engine, interrupts: Interrupts) -> Result:
    settings = job.settings
    check_same_run(job, engine)
    if settings.trace is not None:
        engine.keep_trace()
    if settings.resume:
        say_resumed(job, engine)
    io_before = engine.io_bytes()
    measured = _train(job, engine, interrupts)
    engine.flush()
    interrupts.check()
    if settings.trace is not None and measured.losses:
        engine.write_trace(settings.trace.expanduser())
    read, written = since(io_before, engine.io_bytes())
    save(job, engine)
    if settings.sample is not None:
        _sample(job, engine, settings.sample)
    report = measured.report(
        (engine.parameters, engine.trainable_parameters),
        (engine.device_peak_bytes, engine.host_peak_bytes, engine.host_baseline_bytes),
        (read, written),
        engine.planned_io_bytes(),
        clip_by=engine.clip_by,
    )
    store = tuple(path / job.run_name for path in job.ssd)
    result = Result(report, written + engine.created_bytes, job.output, store)
    conclude(job, report, result.total_written, "store", ", ".join(map(str, store)))
    return result


def _train(job: Job, engine: Engine, interrupts: Interrupts) -> Measurements:
    """All steps that are left."""
    done = engine.step_count
    measured = measurements(job, engine)
    memory, disk = _Occasionally(engine.host_memory_in_use), _Occasionally(lambda: _disk_usage(job))
    with MetricsLogger(job, done, asdict(engine.memory_plan)) as said:
        if not done and is_due(job, 0):
            _evaluate(job, engine, said, measured)
        ended, io_before = time.perf_counter(), engine.io_bytes()
        for step in range(done + 1, job.steps + 1):
            interrupts.check()
            batch = job.batches.batch(step - 1)
            check_ids(job, batch)
            engine.lr = job.learning_rate.at(step)
            engine(**batch).loss.backward()
            report = engine.step()
            if is_due(job, step):
                engine.flush()  # what it writes back is its own, not the evaluation's

            # From the end of one step to that of the next: what a step writes back runs on into the next one.
            began, ended = ended, time.perf_counter()
            measured.add(
                report.loss, ended - began, report.bound_seconds, report.clipped, report.skipped, report.updated_again
            )
            now = engine.io_bytes()
            io, io_before = since(io_before, now), now
            line = step_line(engine, report, measured, ended - began, io, memory(), ssd_bytes=disk())
            said.step(line, engine.lr, ended - began)
            if is_due(job, step):
                _evaluate(job, engine, said, measured)
                ended, io_before = time.perf_counter(), engine.io_bytes()
    return measured


def _evaluate(job: Job, engine: Engine, said: MetricsLogger, measured: Measurements) -> None:
    """Look at the held-out data; their traffic is not the steps'."""
    before, planned = engine.io_bytes(), engine.planned_io_bytes()
    look(job, lambda batch: engine.eval_loss(**batch), engine.step_count, said)
    measured.leave_out(since(before, engine.io_bytes()), since(planned, engine.planned_io_bytes()))


def _sample(job: Job, engine: Engine, prompt: str) -> None:
    """Show what the model makes of a prompt."""
    settings = job.settings
    pieces = continuation(
        engine.next_logits, tokenizer_of(settings, job.checkpoint, "--sample"), prompt, settings.sample_tokens,
        settings.temperature, job.seq_len, settings.seed,
    )  # fmt: skip
    print_sample(pieces, prompt)


def step_line(
    engine: Engine,
    report: StepReport,
    measured: Measurements,
    seconds: float,
    io: tuple[int, ...],
    host_bytes: int,
    **others: int,
) -> StepLine:
    """A step in figures, ``others`` among them that not every run has.

    Args:
        io: bytes read and written in the step's ``seconds``.
    """
    rate, bounds = measured.tokens_per_step / seconds, report.bound_seconds
    return StepLine(
        report.step, report.loss, report.grad_norm, rate, rate * measured.model_flops, io[0] / seconds,
        io[1] / seconds, engine.device_peak_bytes, host_bytes,
        max(bounds, key=lambda name: bounds[name], default="nothing"), engine.emulated, busy_seconds=bounds,
        skipped=report.skipped, aux_loss=report.aux_loss, **others,
    )  # fmt: skip


def since(before: tuple[int, int], now: tuple[int, int]) -> tuple[int, int]:
    """Bytes read and written between two counts."""
    return now[0] - before[0], now[1] - before[1]


def _disk_usage(job: Job) -> int:
    """Bytes that the store takes on all drives."""
    folders = (path / job.run_name for path in job.ssd)
    return sum(file.stat().st_blocks * 512 for folder in folders for file in folder.iterdir() if file.is_file())


class _Occasionally:
    """A figure that is slow to read, read every other second."""

    def __init__(self, read: Callable[[], int]) -> None:
        self._read = read
        self._next = 0.0
        self._value = 0

    def __call__(self) -> int:
        if time.monotonic() >= self._next:
            self._value = self._read()
            self._next = time.monotonic() + 2
        return self._value
