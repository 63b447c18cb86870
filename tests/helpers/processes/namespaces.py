"""Network namespaces of a test."""

import pytest

from common.errors import UserError
from tests.helpers.scripts import load_script

netcluster = load_script("netcluster")


def _why_not() -> str:
    """Why no cluster can be made here, or nothing."""
    try:
        with netcluster.Cluster(1, "1gbit"):
            return ""
    except (UserError, netcluster.ClusterError) as error:
        return str(error)


WHY_NOT = _why_not()
needs_namespaces = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT or "can be made here")
