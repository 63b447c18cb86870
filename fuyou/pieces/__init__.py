"""Blocks in pieces: a block that is larger than the device is computed on parts of its parameters, one after another.

``run``              one micro-batch's pass through a block, as a coroutine that waits for pieces
``handles``          the parameters to bind to the model, and where their gradients go (``handle``: one of them)
``division``         how a block is cut
``recording``        in which order its pieces are needed, from a run without values (``meta_block``)
``expert_adapters``  a mixture's experts, range by range: as ``grouped_experts``, which leave out what recomputation
                     does not need, or ``eager_experts``

Tried on the CPU, bit for bit; not run on a GPU.
"""
