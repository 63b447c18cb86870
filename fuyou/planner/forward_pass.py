"""How long a forward pass alone takes: that of an evaluation, or of a reference before training."""

from fuyou.planner.evaluate import Evaluator, busy_seconds
from fuyou.planner.run_plan import RunPlan
from fuyou.schedule.scheduler import Scheduler


def forward_seconds(result: RunPlan) -> float:
    """Return the seconds of a forward pass over one batch, from its own tasks: of the resource that takes longest.

    Args:
        result: a plan that fits.
    """
    assert result.memory is not None
    memory, job = result.memory, result.job
    scheduler = Scheduler(job.shape, memory.counts, resident=memory.resident, direct_reads=job.direct_reads)
    tasks = scheduler.evaluation(0, memory.batch_shape(memory.batch))
    return max(busy_seconds(tasks, Evaluator(result.job, result.machine).rates).values())
