"""Many nodes on an ordinary network: FSDP2 models whose parameters are cached in host memory (FCDP)."""

import common

if getattr(common, "PROJECT", None) != "fuyou":
    _found = getattr(common, "__file__", None) or ", ".join(getattr(common, "__path__", ["an unknown place"]))
    raise ImportError(
        f"fcdp needs the package 'common' that it was installed with, but Python found another 'common' first, "
        f"in {_found}: rename that one, take its folder off the module search path, or run from another folder."
    )

from fcdp.cache.staleness import StaleCacheError
from fcdp.shard import Replacement, fully_shard, install, replace_fsdp2, sharding
from fcdp.sharding import Sharding
from fcdp.strategy.strategy import Strategy
from fcdp.strategy.topology import Topology

__all__ = [
    "Replacement",
    "Sharding",
    "StaleCacheError",
    "Strategy",
    "Topology",
    "fully_shard",
    "install",
    "replace_fsdp2",
    "sharding",
]
