"""How large the pieces are into which blocks are cut that are larger than the device."""

from collections.abc import Callable
from dataclasses import replace

from common.errors import UserError
from fuyou.layout.model_layout import ModelLayout
from fuyou.layout.record import Kind
from fuyou.model.reference import check_whole_blocks
from fuyou.model.streamed_model import StreamedModel
from fuyou.pieces.cut import in_pieces
from fuyou.pieces.meta_block import unchanged
from fuyou.planner.training_job import TrainingJob
from fuyou.schedule.memory_plan import MemoryPlan
from fuyou.schedule.memory_planner import MemoryPlanner

PARTS = (2, 4, 8, 16, 32, 64, 128)  # Numbers of pieces that are tried for the largest block
# Buffers on the device that pieces should have: two for what comes ahead of its use, two for what is computed with.
BUFFERS = 4


def fitting_layout(stack: StreamedModel, shape: ModelLayout, plan: Callable[[ModelLayout], MemoryPlan]) -> ModelLayout:
    """Return ``shape`` if its blocks fit into memory, else the same model with blocks in pieces that do.

    Pieces are as large as they can be without taking memory from micro-batches: fewer of these read parameters less
    often. Among pieces that come as seldom and leave room for several buffers, those are best of which most bytes are
    on the device at once: uploads go on while computing takes longer, and more pieces are there still when the next
    micro-batch needs them. Of two alike it is the larger, which move at the full rate of a link.

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
    found: list[tuple[tuple[int, ...], ModelLayout]] = []
    cut: ModelLayout | None = None
    with unchanged(stack):
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
            batch, buffers = fitting.batch, fitting.counts.device_blocks
            on_device = buffers * cut.device_nbytes(Kind.BLOCK)
            passes = batch.passes_in_pieces(bool(shape.trained_elements(Kind.BLOCK)))
            found.append(((-passes, min(buffers, BUFFERS), on_device, batch.micro_rows), cut))
    if not found:
        raise too_small
    most = max(rank for rank, _ in found)
    return next(layout for rank, layout in found if rank == most)


def fitting_job(job: TrainingJob, device_bytes: int, host_bytes: int, cpu: bool) -> TrainingJob:
    """Return ``job`` with blocks in pieces, if they are too large for a machine or it asks for pieces.

    Args:
        job: whose blocks are whole.
        device_bytes: device memory that it may use.
        host_bytes: host memory that it may use.
        cpu: whether the CPU is the device, so that both are one memory.

    Raises:
        UserError: nothing fits; says how much would. Or what fits are pieces, and the loss needs a reference.
    """
    if job.shape.orders:
        return job
    if job.piece_bytes is not None:
        return _in_pieces(job, in_pieces(job.stack, job.shape, job.piece_bytes))

    def plan(layout: ModelLayout) -> MemoryPlan:
        planner = MemoryPlanner(layout, job.config, device_bytes, host_bytes, cpu, host_cache=job.host_cache)
        return planner.plan(job.rows, job.seq_len, job.micro_batch, job.loss)

    return _in_pieces(job, fitting_layout(job.stack, job.shape, plan))


def _in_pieces(job: TrainingJob, shape: ModelLayout) -> TrainingJob:
    """Return ``job`` with blocks laid out so, if what its loss is computed from allows for that."""
    if job.loss.reference:
        check_whole_blocks(shape)
    return replace(job, shape=shape)
