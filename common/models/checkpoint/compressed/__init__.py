"""Checkpoints whose weights are written in fewer bits: FP8, MXFP4 and compressed-tensors, one tensor at a time.

``tensors``             one tensor in codes and scales, and back into numbers
``detection``           how a checkpoint is compressed, by the ``quantization_config`` in its config.json
``method``              what a method of compression finds in the files: which tensors belong together
``block_scaled``        the methods FP8 and MXFP4
``compressed_tensors``  the formats of the library of that name
``shards``              the files of such a checkpoint as if they held plain tensors
``parameters``          a parameter of the model as the checkpoint has it: one such tensor or several (experts)
``placement``           where several tensors go when they are put together into one parameter
"""

from common.models.checkpoint.compressed.detection import CompressedShards, accept_config, method_of
from common.models.checkpoint.compressed.method import Method
from common.models.checkpoint.compressed.parameters import CompressedParameter
from common.models.checkpoint.compressed.placement import Placements
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
