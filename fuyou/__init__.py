"""One node: fine-tuning out of core, with its schedule, its optimizer process and its store."""

import importlib
from typing import TYPE_CHECKING, Any

import common

if getattr(common, "PROJECT", None) != "fuyou":
    _found = getattr(common, "__file__", None) or ", ".join(getattr(common, "__path__", ["an unknown place"]))
    raise ImportError(
        f"fuyou needs the package 'common' that it was installed with, but Python found another 'common' first, "
        f"in {_found}: rename that one, take its folder off the module search path, or run from another folder."
    )

if TYPE_CHECKING:
    from fuyou.config import EngineConfig
    from fuyou.engine.engine import Engine
    from fuyou.engine.steps import EngineOutput
    from fuyou.model.recompute.policy import ActivationPolicy
    from fuyou.optimizer.nonfinite import NonFiniteLoss
    from fuyou.preflight.preflight import prove
    from fuyou.runtime.accounting import StepReport

__all__ = [
    "ActivationPolicy",
    "Engine",
    "EngineConfig",
    "EngineOutput",
    "NonFiniteLoss",
    "StepReport",
    "prove",
]

_MODULES = {
    "Engine": "engine.engine",
    "EngineConfig": "config",
    "EngineOutput": "engine.steps",
    "ActivationPolicy": "model.recompute.policy",
    "NonFiniteLoss": "optimizer.nonfinite",
    "StepReport": "runtime.accounting",
    "prove": "preflight.preflight",
}


def __getattr__(name: str) -> Any:
    """Import what is asked for: the optimizer process needs none of it, and transformers takes seconds to import."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"fuyou.{_MODULES[name]}"), name)
