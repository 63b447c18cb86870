"""Blocks in pieces: a block that is larger than the device is computed on parts of its parameters, one after another.

``run``          one micro-batch's pass through a block, as a coroutine that waits for pieces
``handles``      tensors without memory that stand for parameters
``experts``      a mixture's experts, range by range
``division``     how a block is cut
``order``        in which order its pieces are needed
"""
