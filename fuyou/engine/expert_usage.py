"""Counting which experts of a mixture the data are sent to, with the engine's own evaluation pass."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from common.errors import UserError
from common.files.atomic import replace_file
from common.models.experts import ExpertChoice, ExpertUsage, UsageRecorder, choose_experts
from fuyou.engine.engine import Engine

EXPERTS_FILE = "experts.json"
"""Name of the file, in the run's first directory, with the experts that were chosen and what they were chosen by."""


def profile_experts(engine: Engine, batches: Iterable[Mapping[str, Any]]) -> ExpertUsage:
    """Count which experts the tokens of some batches are sent to, streaming the model once for each batch.

    Nothing changes but pending updates, which are applied first. With several ranks each has batches of its own, as
    many as the others, and all get the sum. Tokens that ``attention_mask`` hides are left out.

    Args:
        engine: of a mixture of experts.
        batches: as in training.

    Raises:
        UserError: the model has no experts that can be seen, there are no batches, or the run is emulated.
    """
    if engine.emulated:
        raise UserError("A run on an emulated device computes nothing, so its routers choose nothing.")
    run = engine._run
    recorder, any_batch = UsageRecorder(run.model.stack.model), False
    for batch in batches:
        any_batch = True
        mask = batch.get("attention_mask")
        with recorder.recording(mask if mask is not None and mask.dim() == 2 else None):
            engine.eval_loss(**batch)
    if not any_batch:
        raise UserError("There are no batches to count the use of experts with.")
    usage = recorder.usage()
    return usage if run.agreement is None else ExpertUsage.combined(run.agreement.all_gather_object(usage))


def choose_and_note_experts(engine: Engine, usage: ExpertUsage, fraction: float, score: str = "gates") -> ExpertChoice:
    """Choose experts to train, and write the choice to :data:`EXPERTS_FILE` in the run's first directory.

    Args:
        engine: whose run it is.
        usage: from :func:`profile_experts`.
        fraction: part of all experts that may be chosen.
        score: ``"gates"`` or ``"tokens"``; see :func:`common.models.experts.choose_experts`.

    Raises:
        UserError: ``fraction`` or ``score`` is out of range.
    """
    choice = choose_experts(usage, fraction, score)
    path = Path(engine._run.config.store.folders[0]) / EXPERTS_FILE
    replace_file(path, json.dumps(choice.to_dict(), indent=1) + "\n", durable=True)
    return choice
