"""One node: fine-tuning out of core, with its schedule, its optimizer process and its store."""

import common

if getattr(common, "PROJECT", None) != "fuyou":
    _found = getattr(common, "__file__", None) or ", ".join(getattr(common, "__path__", ["an unknown place"]))
    raise ImportError(
        f"fuyou needs the package 'common' that it was installed with, but Python found another 'common' first, "
        f"in {_found}: rename that one, take its folder off the module search path, or run from another folder."
    )

from fuyou.accounting import StepReport
from fuyou.compute import NonFiniteLoss
from fuyou.engine import Engine, EngineOutput
from fuyou.keeping import Keeping

__all__ = ["Engine", "EngineOutput", "Keeping", "NonFiniteLoss", "StepReport"]
