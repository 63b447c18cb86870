"""Fine-tune out of core on one node. A list of tasks moves blocks between SSDs, host, and device while they compute."""

import importlib
import importlib.metadata
from typing import TYPE_CHECKING, Any

import common

if getattr(common, "PROJECT", None) != "fuyou":
    _found = getattr(common, "__file__", None) or ", ".join(getattr(common, "__path__", ["an unknown place"]))
    raise ImportError(
        f"fuyou needs the package 'common' that it was installed with, but Python found another 'common' first, "
        f"in {_found}: rename that one, take its folder off the module search path, or run from another folder."
    )

if TYPE_CHECKING:
    from common.errors import FinetuneError as FinetuneError
    from common.errors import UserError as UserError
    from common.models.checkpoint.writer import NonFiniteWeights as NonFiniteWeights
    from common.store.errors import StoreError as StoreError
    from fuyou.config import EngineConfig as EngineConfig
    from fuyou.engine.engine import Engine as Engine
    from fuyou.engine.steps import EngineOutput as EngineOutput
    from fuyou.model.recompute.policy import ActivationPolicy as ActivationPolicy
    from fuyou.optimizer.nonfinite import NonFiniteLoss as NonFiniteLoss
    from fuyou.preflight.proof import prove as prove
    from fuyou.runtime.accounting import StepReport as StepReport

_MODULES = {
    "ActivationPolicy": "fuyou.model.recompute.policy",
    "Engine": "fuyou.engine.engine",
    "EngineConfig": "fuyou.config",
    "EngineOutput": "fuyou.engine.steps",
    "FinetuneError": "common.errors",
    "NonFiniteLoss": "fuyou.optimizer.nonfinite",
    "NonFiniteWeights": "common.models.checkpoint.writer",
    "StepReport": "fuyou.runtime.accounting",
    "StoreError": "common.store.errors",
    "UserError": "common.errors",
    "prove": "fuyou.preflight.proof",
}
__all__ = list(_MODULES)


def __getattr__(name: str) -> Any:
    """Import on demand: the optimizer process needs none of it, and transformers takes seconds to import."""
    if name == "__version__":
        return importlib.metadata.version("fuyou")
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
