"""``finetune`` on one machine: from the settings to a trained model."""

import contextlib
from dataclasses import dataclass
from pathlib import Path

from cli.job.job import Job
from cli.job.prepare import prepare, quiet_transformers
from cli.job.resumed import check_same_run, forget_earlier_run
from cli.options.settings import Settings
from cli.train.engine_trainer import EngineTrainer, engine_options, profile_once
from cli.train.interrupts import Interrupts, Stopped
from cli.train.loop import RunResult, conclude, train
from cli.train.sample import print_sample
from common.activity import activity
from common.errors import UserError
from common.store import DirectoryLock
from fuyou import Engine, NonFiniteLoss


@dataclass
class SingleProcess:
    """A process that trains alone, and that signals interrupt."""

    interrupts: Interrupts
    is_rank0: bool = True
    world_size: int = 1
    restarted: bool = False

    def enter(self, where: str) -> None:
        """Raise KeyboardInterrupt if a signal came whose exception was lost."""
        self.interrupts.check()


def finetune(settings: Settings, interrupts: Interrupts) -> RunResult:
    """Prepare, train, export and report.

    Raises:
        Stopped: by the user; says how to continue.
        UserError, FinetuneError: with a note on how to continue, if there is something to continue.
    """
    if not settings.debug:
        quiet_transformers()
    with activity("preparing the run: model, memory, data", announced=True):
        job = prepare(settings)
    print(job.header(), flush=True)
    profile_once(job)
    interrupts.how_to_continue = settings.how_to_continue
    with DirectoryLock([job.output]), contextlib.ExitStack() as stack:
        forget_earlier_run(settings)
        engine = stack.enter_context(_opened(job))
        try:
            result = _train(job, engine, SingleProcess(interrupts))
        except KeyboardInterrupt:
            step = engine.step_count + 1
            with activity(f"stopping in step {step}: what is committed stays"):
                engine.close()
            committed = f"step {engine.committed_step} is committed"
            raise Stopped(f"stopped in step {step}; {committed}. {settings.how_to_continue}") from None
        except UserError:
            raise
        except Exception as error:
            engine.close()
            if not isinstance(error, NonFiniteLoss):  # which is reported already
                error.add_note(f"Step {engine.committed_step} is committed.")
            error.add_note(settings.how_to_continue)
            raise
    job.close()
    return result


def _train(job: Job, engine: Engine, process: SingleProcess) -> RunResult:
    check_same_run(job, engine)
    trainer = EngineTrainer(job, engine)
    measured = train(job, trainer, process)
    result = conclude(job, trainer, process, measured)
    if job.settings.sample is not None and measured.is_saved:
        engine.close()  # its memory is the sample's now
        print_sample(job, job.settings.sample)
    process.interrupts.finish()
    assert result is not None
    return result


def _opened(job: Job) -> Engine:
    where = ", ".join(str(path) for path in job.ssd)
    doing = f"reading what the run has in {where}" if job.settings.resume else f"writing the weights to {where}"
    with activity(doing, announced=True):
        return _open_engine(job)


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
        batch_shape=(job.rows, job.seq_len),
    )
