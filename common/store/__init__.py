"""Store records on SSDs: striped over a directory per drive, past the page cache. A manifest commits them at once."""

from common.store.directories import DirectoryLock, remove
from common.store.errors import StoreError
from common.store.layout import ALIGNMENT, Extent, Layout
from common.store.manifest import commit_manifest, first_manifest, load_manifest
from common.store.posix import Throttle
from common.store.store import Io, Store

__all__ = [
    "ALIGNMENT", "DirectoryLock", "Extent", "Io", "Layout", "Store", "StoreError", "Throttle",
    "commit_manifest", "first_manifest", "load_manifest", "remove",
]  # fmt: skip
