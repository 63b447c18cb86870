"""Exporting what an open run has trained, by the ranks of one node together."""

from pathlib import Path

from common.models.adapters.adapters import MERGED
from common.models.checkpoint.writer import NonFiniteWeights
from fuyou.checkpoint.export import StoreExporter
from fuyou.engine.opening import OpenRun
from fuyou.layout.record import Kind

# Bytes in fp32 up to which adapters are exported next to the buffers, within the memory that is left for small things:
# those are made again in seconds.
SMALL_BYTES = 8 << 20


def save(run: OpenRun, directory: Path, merge: bool, allow_nonfinite: bool) -> None:
    """Write a checkpoint or an adapter; nothing may be pending. Collective.

    All buffers are given back, but for small adapters, which somebody may want after every step.

    Args:
        run: whose store is read.
        directory: made if it is not there.
        merge: whether to write a checkpoint with the adapters merged, too.
        allow_nonfinite: whether to write NaNs and infinities.

    Raises:
        NonFiniteWeights: a tensor holds a NaN or an infinity, on every rank.
    """
    adapters = sum(record.parameter_count * 4 for record in run.layout.of_kind(Kind.ADAPTER))
    if merge or run.model.adapters is None or adapters > SMALL_BYTES:
        run.runtime.close()
    share = run.layout.share
    refused = None
    try:
        if share.node == 0:  # whose ranks have everything together
            _write(run, directory, merge, share.rank == 0, allow_nonfinite)
    except NonFiniteWeights as error:  # on the rank that writes, when all others have read all
        refused = error
    names = run.agreement.all_gather_object(None if refused is None else refused.name)
    name = next(filter(None, names), None)
    if name is not None:
        raise NonFiniteWeights(name) from refused


def _write(run: OpenRun, directory: Path, merge: bool, writes: bool, allow_nonfinite: bool) -> None:
    """``writes``: whether this rank writes what the ranks of this node read together."""
    dtype = run.config.precision.dtype
    exporter = StoreExporter(
        run.model, run.reader(), run.layout, run.checkpoint, run.limits[0], writes, allow_nonfinite
    )
    with run.runtime.io.not_counted():
        if run.model.adapters is None:
            exporter.checkpoint(directory, dtype)
            return
        refused = None
        try:
            if merge:  # first: if it is refused, the adapters of before stay, too
                exporter.checkpoint(directory / MERGED, dtype)
        except NonFiniteWeights as error:
            refused = error
        # Whose records all ranks of the node read together
        exporter.adapter(directory, write=refused is None)
        if refused is not None:
            raise refused
