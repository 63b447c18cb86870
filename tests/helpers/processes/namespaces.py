"""Network namespaces of a test."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from common.errors import UserError

ROOT = Path(__file__).parents[3]
SCRIPT = ROOT / "scripts" / "netcluster.py"


def _load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("netcluster", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["netcluster"] = module
    spec.loader.exec_module(module)
    return module


netcluster = _load()


def _why_not() -> str:
    """Why no cluster can be made here, or nothing."""
    try:
        with netcluster.Cluster(1, "1gbit"):
            return ""
    except (UserError, netcluster.ClusterError) as error:
        return str(error)


WHY_NOT = _why_not()
needs_namespaces = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT or "can be made here")
