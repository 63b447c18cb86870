"""Read checkpoints whose weights have fewer bits: FP8, MXFP4, and compressed-tensors. Each tensor is decoded alone."""

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
