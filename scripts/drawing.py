"""What scripts that draw pictures share."""

from pathlib import Path
from typing import Any

from common.errors import UserError


def open_pyplot() -> Any:
    """matplotlib's pyplot, drawing into files.

    Raises:
        UserError: matplotlib is missing.
    """
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        raise UserError("Drawing needs matplotlib: pip install 'fuyou[plots]', or pip install matplotlib.") from None
    return pyplot


def save(pyplot: Any, figure: Any, path: Path, dpi: int) -> None:
    """Write ``figure`` to ``path``, whose ending says in which format, and drop it.

    Raises:
        UserError: the file cannot be written.
    """
    try:
        figure.savefig(path, dpi=dpi)
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be written: {error}.") from None
    finally:
        pyplot.close(figure)
