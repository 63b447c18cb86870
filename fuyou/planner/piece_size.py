"""How large the pieces are into which blocks are cut that are larger than the device."""

from collections.abc import Callable
from dataclasses import replace

from common.errors import UserError
from fuyou.layout.model_layout import ModelLayout
from fuyou.model.streamed_model import StreamedModel
from fuyou.pieces.cut import in_pieces
from fuyou.planner.machine import Machine
from fuyou.planner.training_job import TrainingJob
from fuyou.schedule.memory_plan import MemoryPlan
from fuyou.schedule.memory_planner import MemoryPlanner

PARTS = (2, 4, 8, 16, 32, 64, 128)
"""Numbers of pieces that are tried for the largest block."""


def fitting_layout(stack: StreamedModel, shape: ModelLayout, plan: Callable[[ModelLayout], MemoryPlan]) -> ModelLayout:
    """Return ``shape`` if its blocks fit into memory, else the same model with blocks in pieces that do.

    Pieces are as large as they can be without taking memory from micro-batches: fewer of these read parameters less
    often, and large pieces move at the full rate of a link.

    Args:
        stack: the model.
        shape: its records.
        plan: returns the memory plan of a layout.

    Raises:
        UserError: nothing fits; says how much would.
    """
    try:
        plan(shape)
        return shape
    except UserError as error:
        if shape.orders:
            raise
        too_small = error
    largest = shape.block_elements * shape.precision.parameter_bytes
    found: list[tuple[tuple[int, int], ModelLayout]] = []
    cut: ModelLayout | None = None
    for parts in PARTS:
        try:
            before, cut = cut, in_pieces(stack, shape, largest // parts)
        except UserError as error:
            raise UserError(f"{too_small} And they cannot be in pieces: {error}") from error
        if before is not None and len(before.records) == len(cut.records):
            continue  # nothing of it can be cut further
        try:
            fitting = plan(cut)
        except UserError as error:
            too_small = error
            continue
        found.append(((fitting.batch.micro_rows, fitting.counts.device_blocks), cut))
    if not found:
        raise too_small
    most = max(rank for rank, _ in found)
    return next(layout for rank, layout in found if rank == most)


def fitting_job(job: TrainingJob, machine: Machine) -> TrainingJob:
    """Return ``job`` with blocks in pieces, if they are too large for ``machine`` or it asks for pieces.

    Raises:
        UserError: nothing fits; says how much would.
    """
    if job.shape.orders:
        return job
    if job.piece_bytes is not None:
        return replace(job, shape=in_pieces(job.stack, job.shape, job.piece_bytes))

    def plan(layout: ModelLayout) -> MemoryPlan:
        planner = MemoryPlanner(
            layout, job.config, machine.device_bytes, machine.host_bytes, machine.cpu, host_cache=job.host_cache
        )
        return planner.plan(job.rows, job.seq_len, job.micro_batch, job.loss)

    return replace(job, shape=fitting_layout(job.stack, job.shape, plan))
