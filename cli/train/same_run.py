"""What must stay the same when a run is continued."""

from collections.abc import Collection
from typing import Any, Protocol

from cli.job.job import ADAPTERS, LONG_RECORDS, TEMPLATE_DATE, Job
from cli.job.resumed import check_same
from common.errors import UserError
from common.units import counted

_OPTIONAL = (LONG_RECORDS, TEMPLATE_DATE, ADAPTERS, "--min-lr")
"""Settings that runs of earlier versions did not note."""


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
    then = dict(fixed_then)
    is_extended = _is_extended(job, run, then)
    if is_extended:
        for option in ("--steps", "--warmup"):
            then[option] = fixed.get(option)
    # Options that one side does not have are those of a constant rate, or of a run of an earlier version.
    check_same(then | {name: then.get(name) for name in fixed if name not in _OPTIONAL}, fixed)
    if run.step_count > job.steps:
        raise UserError(f"--resume: this run has {run.step_count} steps behind it, more than --steps {job.steps}.")
    if is_extended:
        run.user_state["run"] = fixed


def _is_extended(job: Job, run: ContinuedRun, then: dict[str, Any]) -> bool:
    """Return whether a run that has come to its end is to go on, with more steps than it had: allowed, and said.

    The learning rate of the steps to come is that of a run of so many steps.
    """
    before = then.get("--steps")
    if before is None or not before <= run.step_count < job.steps:
        return False
    step = run.step_count + 1
    print(
        f"extended from {counted(before, 'step')} to {job.steps:,}: the learning rate of step {step:,} is "
        f"{job.learning_rate.at(step):g}",
        flush=True,
    )
    return True
