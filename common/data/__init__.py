"""Training data: files of several formats become packed rows of tokens, which are read batch by batch."""

from common.data.batches import Batches, DataConfig, PackedBatches, RandomBatches
from common.data.documents import Documents, restarts
from common.data.prepare import open_data

__all__ = ["Batches", "DataConfig", "Documents", "PackedBatches", "RandomBatches", "open_data", "restarts"]
