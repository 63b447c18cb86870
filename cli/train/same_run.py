"""What must stay the same when a run is continued."""

from collections.abc import Collection
from typing import Any, Protocol

from cli.job.job import LONG_RECORDS, Job
from common.errors import UserError


class ContinuedRun(Protocol):
    """An engine or a trainer, as far as it knows what its run has behind it."""

    step_count: int
    user_state: dict[str, Any]


def check_same_run(job: Job, run: ContinuedRun, launches: Collection[str] = ()) -> None:
    """Compare the job with what the run began with; a new run remembers it.

    Args:
        job: what is asked for now.
        run: what is to be trained; its ``user_state`` is committed with every step.
        launches: ids of the launchers that have started the run's ranks, to be remembered as well.

    Raises:
        UserError: something differs.
    """
    if launches:
        run.user_state["launches"] = sorted({*run.user_state.get("launches", ()), *launches})
    fixed = job.fixed_settings
    fixed_then: dict[str, Any] | None = run.user_state.get("run")
    if fixed_then is None:
        run.user_state["run"] = fixed
        return
    for option in {**fixed_then, **fixed}:
        before, now = fixed_then.get(option), fixed.get(option)
        if before == now:
            continue
        if option == LONG_RECORDS:
            if not (before and now):  # a run of an earlier version, or without data: their key tells
                continue
            raise UserError(
                f"--resume: this run began with {before}, and now it is {now}. Give {before}, or begin a new run in "
                "another --output."
            )
        if option == "--data":
            raise UserError(
                "--resume: --data is not what this run began with: other or changed texts, or another tokenizer "
                f"({before} then, {now} now). Give what it began with, or begin a new run in another --output."
            )
        raise UserError(
            f"--resume: this run began with {option} {before}, and now it is {now}. Give {option} {before}, "
            "or begin a new run in another --output."
        )
    if run.step_count > job.steps:
        raise UserError(f"--resume: this run has {run.step_count} steps behind it, more than --steps {job.steps}.")
