"""Compute a block that is larger than the device from parts of its parameters, one after another, bit for bit.

``division`` cuts a block, ``recording`` finds the order of its pieces, ``handles`` bind them to the model, and ``run``
is a pass that waits for each (tried on the CPU, not run on a GPU).
"""
