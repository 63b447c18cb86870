"""Looking at a machine, a model or a store without training: ``--check``, ``--profile``, ``--verify``."""
