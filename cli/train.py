"""The training loop: a thin user of the engine."""

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers.utils import logging as transformers_logging

from cli.history import History
from cli.interrupts import Interrupts, Stopped
from cli.prepare import Job, prepare
from cli.progress import Progress, StepLine
from cli.report import Measurements, Report
from cli.settings import Settings
from common.errors import UserError
from fuyou import Engine


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
        transformers_logging.set_verbosity_error()
        transformers_logging.disable_progress_bar()
    job = prepare(settings)
    print(job.header(), flush=True)
    with _open_engine(job) as engine:
        try:
            result = _train_and_save(job, engine, interrupts)
        except KeyboardInterrupt:
            step = engine.step_count + 1
            engine.close()
            raise Stopped(f"stopped in step {step}; {_how_to_continue(settings, engine)}") from None
        except UserError:
            raise
        except Exception as error:
            engine.close()
            error.add_note(_how_to_continue(settings, engine).capitalize())
            raise
    job.batches.close()
    return result


def _open_engine(job: Job) -> Engine:
    settings = job.settings
    return Engine(
        settings.model if job.checkpoint is None else job.checkpoint,
        ssd=list(job.ssd),
        device=job.device,
        dtype=settings.dtype,
        optimizer_dtype=settings.optimizer_dtype,
        lr=settings.lr,
        betas=(settings.beta1, settings.beta2),
        eps=settings.eps,
        weight_decay=settings.weight_decay,
        max_grad_norm=settings.max_grad_norm or None,
        micro_batch=settings.micro_batch,
        host_memory=settings.host_memory,
        device_memory=settings.device_memory,
        seed=settings.seed,
        run_name=job.run_name,
        commit_every=settings.commit_every,
        single_slot=settings.single_slot,
        resume=settings.resume,
        overwrite=settings.overwrite,
        io=settings.io,
        batch_shape=(settings.batch_size, job.seq_len),
    )


def _train_and_save(job: Job, engine: Engine, interrupts: Interrupts) -> Result:
    settings = job.settings
    _check_same_run(job, engine)
    done = engine.step_count
    if settings.resume:
        print(f"resume   after step {done:,} of {job.steps:,}", flush=True)
    measured = Measurements(
        settings.batch_size * job.seq_len,
        engine.model_flops_per_token(job.seq_len),
        engine.hardware_flops_per_token(job.seq_len),
    )
    io_before = engine.io_bytes()
    with History(job.output, done) as history, Progress(job.steps, done) as progress:
        for step in range(done + 1, job.steps + 1):
            interrupts.check()
            line, lr = _take_step(job, engine, measured, step)
            history.append(step, line.loss, line.grad_norm, lr)
            progress.show(line)
        engine.flush()
        interrupts.check()
    read, written = (after - before for after, before in zip(engine.io_bytes(), io_before, strict=True))
    report = measured.report(
        (engine.parameters, engine.trainable_parameters),
        (engine.device_peak_bytes, engine.host_peak_bytes, engine.host_baseline_bytes),
        (read, written),
    )
    if settings.save:
        print(f"writing the checkpoint to {job.output}", flush=True)
        engine.save_pretrained(job.output)
    if settings.report is not None:
        report.write(settings.report.expanduser())
    result = Result(report, written + engine.created_bytes, job.output, tuple(path / job.run_name for path in job.ssd))
    print(report.summary(result.total_written))
    print(_where(job, result), flush=True)
    return result


def _take_step(job: Job, engine: Engine, measured: Measurements, step: int) -> tuple[StepLine, float]:
    """One step, and what it measured; the learning rate that it had."""
    batch = job.batches.batch(step - 1)
    _check_ids(job, batch)
    io_before = engine.io_bytes()
    engine.lr = lr = job.learning_rate.at(step)
    out = engine(**batch)
    out.loss.backward()
    done = engine.step()
    measured.add(done.loss, done.seconds, done.bound_seconds, (done.planned_read_bytes, done.planned_written_bytes))
    read, written = (after - before for after, before in zip(engine.io_bytes(), io_before, strict=True))
    rate = measured.tokens_per_step / done.seconds
    line = StepLine(
        step, done.loss, done.grad_norm, rate, rate * measured.model_flops, read / done.seconds,
        written / done.seconds, engine.device_peak_bytes, engine.host_memory_in_use(),
        max(done.bound_seconds, key=lambda name: done.bound_seconds[name], default="nothing"),
    )  # fmt: skip
    return line, lr


def _check_same_run(job: Job, engine: Engine) -> None:
    """Remember what must stay the same, or compare it with what the run began with."""
    fixed = job.fixed_settings
    began: dict[str, Any] | None = engine.user_state.get("run")
    if began is None:
        engine.user_state["run"] = fixed
        return
    for option in {**began, **fixed}:
        before, now = began.get(option), fixed.get(option)
        if before == now:
            continue
        if option == "--data":
            raise UserError(
                "--resume: --data is not what this run began with: other files, changed since, or another tokenizer "
                f"({before} then, {now} now). Give what it began with, or begin a new run in another --output."
            )
        raise UserError(
            f"--resume: this run began with {option} {before}, and now it is {now}. Give {option} {before}, "
            "or begin a new run in another --output."
        )
    if engine.step_count > job.steps:
        raise UserError(f"--resume: this run has {engine.step_count} steps behind it, more than --steps {job.steps}.")


def _check_ids(job: Job, batch: dict[str, Any]) -> None:
    largest = int(batch["input_ids"].max())
    if largest >= job.vocab_size:
        raise UserError(
            f"The tokenizer gives token {largest}, and the model knows {job.vocab_size:,} tokens (0 to "
            f"{job.vocab_size - 1}): {job.checkpoint} holds a tokenizer that does not belong to its model."
        )


def _how_to_continue(settings: Settings, engine: Engine) -> str:
    if settings.single_slot:
        return "a run in a single slot cannot be continued after that."
    words = [word for word in settings.arguments if word not in ("--resume", "--overwrite")]
    return f"step {engine.committed_step} is committed. To continue: {shlex.join(['finetune', *words, '--resume'])}"


def _where(job: Job, result: Result) -> str:
    lines = {"store": f"{', '.join(map(str, result.store))} (may be deleted when this run is not to be continued)"}
    if job.settings.save:
        lines["saved"] = f"{result.output}, for AutoModelForCausalLM.from_pretrained"
    if job.settings.report is not None:
        lines["report"] = str(job.settings.report)
    return "\n".join(f"{name:8} {text}" for name, text in lines.items())
