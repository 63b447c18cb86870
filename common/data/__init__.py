"""Training data: files of several formats become packed rows of tokens, which are read batch by batch."""

from common.data.batches import Batches, DataConfig, PackedBatches, RandomBatches, open_data
from common.data.documents import Documents, restarts

__all__ = ["Batches", "DataConfig", "Documents", "PackedBatches", "RandomBatches", "open_data", "restarts"]
