"""Counting which experts of a mixture the data are sent to, with the engine's own evaluation pass; training these."""

from collections.abc import Iterable, Mapping
from typing import Any

from common.errors import UserError
from common.models.experts import ExpertChoice, ExpertUsage, UsageRecorder, most_relevant
from fuyou.engine.engine import Engine


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
    of_all = run.agreement.all_gather_object(recorder.usage().to_dict())
    return ExpertUsage.combined([ExpertUsage.from_dict(one) for one in of_all])


def choose_experts(engine: Engine, usage: ExpertUsage, score: str = "gates") -> ExpertChoice:
    """Choose the experts that a run with ``train_experts`` trains: in every layer the most relevant ones.

    The choice is committed, with the experts' first values, so that a run that is resumed keeps it. Collective.

    Args:
        engine: whose run it is, before its first step.
        usage: from :func:`profile_experts`.
        score: relevance of an expert: ``"gates"``, the sum of its weights, or ``"tokens"``, how many it gets.

    Raises:
        UserError: there is no such score; the run trains all experts, or has chosen some already.
    """
    run = engine._run
    if run.model.experts is None:
        raise UserError("This run does not train some experts alone: give the engine train_experts.")
    if run.model.experts.is_chosen:
        raise UserError("This run has chosen its experts: they stay the same to its end.")
    choice = most_relevant(usage, {name: count for name, (count, _) in run.model.experts.counts.items()}, score)
    engine.flush()
    run.choose_experts(choice.experts)
    return choice
