"""The FLOPs of a visit, as tasks count them: 2 per active parameter and token for each product."""

from fuyou.layout.model_layout import ModelLayout, Recomputation
from fuyou.layout.record import Kind
from fuyou.layout.visits import Phase, Visit
from fuyou.schedule.tasks import known


def visit_flops(shape: ModelLayout, visit: Visit, tokens: float, recomputation: Recomputation) -> float:
    """Return a micro-batch's FLOPs: 2 per active parameter and token for the forward pass, for the gradient of the
    input, for the gradients of what is trained, and for what of the forward pass is computed again.

    Args:
        shape: the model's records.
        visit: which of them the micro-batch passes through, and how.
        tokens: tokens of the micro-batch.
        recomputation: what is computed again.
    """
    part = visit.part
    records = [shape.records[index] for index in visit.records]
    if not visit.ends:  # adapters count once in each pass
        records = [record for record in records if record.kind is not Kind.ADAPTER]
    parameters = sum(record.active_count for record in records)
    trained = sum(record.active_count for record in records if record.index == visit.trained)
    forward = 1.0 if visit.phase in (Phase.BLOCK_FORWARD, Phase.HEAD_EVAL, Phase.HEAD) else 0.0
    if visit.phase is Phase.BLOCK_BACKWARD:
        forward = recomputation.fraction(known(visit.layer)) if part is None else float(part.recomputes)
    if visit.phase is Phase.BLOCK_BACKWARD or (visit.phase is Phase.HEAD and visit.passes_on):
        trained += parameters if part is None or part.differentiates else 0
    elif visit.phase is not Phase.HEAD:
        trained = 0  # an embedding's gradient is a sum of rows
    return 2.0 * tokens * (forward * parameters + trained)
