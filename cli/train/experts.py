"""Choosing the experts that are trained, by the first of the training data."""

import json
from collections.abc import Callable

import torch

from cli.job.job import Job
from cli.options.settings import RUN
from common.activity import activity
from common.files.atomic import replace_file
from fuyou import Engine, choose_experts, profile_experts

PROFILED_TOKENS = 1 << 17
"""Tokens to choose experts by: as many as ESFT's authors took (arXiv:2407.01906)."""
PROFILED_BATCHES = 8
"""Most batches to take them from: each reads the whole model once."""
EXPERTS_FILE = "experts.json"
"""File in the run's directory with the chosen experts and what they were chosen by."""

Batch = dict[str, torch.Tensor]


def choose_experts_once(job: Job, engine: Engine, part: Callable[[Batch], Batch], is_rank0: bool) -> None:
    """Choose experts where ``--train-experts`` asks for it and a run has none yet. Collective.

    Args:
        job: the run.
        engine: open.
        part: returns this rank's part of a batch.
        is_rank0: whether to write what was chosen, and say it.
    """
    if job.emulated or not engine.chooses_experts:
        return
    # However many steps there are to be: a run that is made longer would have chosen the same.
    count = min(job.batches.steps_per_epoch, PROFILED_BATCHES, -(-PROFILED_TOKENS // (job.rows * job.seq_len)))
    with activity(f"looking which experts the data use, in {count} {'batch' if count == 1 else 'batches'}"):
        usage = profile_experts(engine, (part(job.batches.batch(number)) for number in range(count)))
        choice = choose_experts(engine, usage)
    if not is_rank0:
        return
    (job.output / RUN).mkdir(exist_ok=True)
    replace_file(job.output / RUN / EXPERTS_FILE, json.dumps(choice.to_dict(), indent=1) + "\n")
    if not job.settings.quiet:
        parts = [choice.part(name) for name in choice.experts]
        print(
            f"{'experts':8} chosen by {count * job.rows * job.seq_len:,} tokens: to these, routers give "
            f"{min(parts):.0%} to {max(parts):.0%} of a layer's weight",
            flush=True,
        )
