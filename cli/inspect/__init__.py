"""``--check``, ``--profile``, and ``--verify``: inspect a machine, a model, or a store without training."""
