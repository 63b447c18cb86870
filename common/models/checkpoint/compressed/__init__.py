"""Checkpoints whose weights are written in fewer bits: FP8, MXFP4 and compressed-tensors, one tensor at a time.

``tensors``    one tensor in codes and scales, and back into numbers
``methods``    how a checkpoint is compressed, by the ``quantization_config`` in its config.json
``blocks``, ``compressed_tensors``  which of its tensors belong together then; ``found`` is what they find
``shards``     the files of such a checkpoint as if they held plain tensors
``parameters`` a parameter of the model as the checkpoint has it: one such tensor or several (experts)
``placement``  where several go when they are put together into one parameter
"""

from common.models.checkpoint.compressed.detection import accept_config, method_of
from common.models.checkpoint.compressed.method import Method
from common.models.checkpoint.compressed.parameters import CompressedParameter
from common.models.checkpoint.compressed.placement import Placements
from common.models.checkpoint.compressed.shards import CompressedShards
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
