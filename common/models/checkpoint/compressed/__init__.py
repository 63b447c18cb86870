"""Checkpoints whose weights are written in fewer bits: FP8, MXFP4 and compressed-tensors, one tensor at a time.

``tensors``     one tensor in codes and scales, and back into numbers
``formats``     which tensors belong together: FP8, MXFP4, and the formats of the library compressed-tensors
``detection``   how a checkpoint is compressed, by its config.json; its files as if they held plain tensors
``parameters``  a parameter of the model as the checkpoint has it: one such tensor or several (experts), put together
"""

from common.models.checkpoint.compressed.detection import CompressedShards, accept_config, method_of
from common.models.checkpoint.compressed.formats import Method
from common.models.checkpoint.compressed.parameters import CompressedParameter, Placements
from common.models.checkpoint.compressed.tensors import CompressedTensor

__all__ = [
    "CompressedParameter",
    "CompressedShards",
    "CompressedTensor",
    "Method",
    "Placements",
    "accept_config",
    "method_of",
]
