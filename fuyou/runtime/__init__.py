"""Run a step's list of tasks, one lane for each kind. Buffers, devices, and the optimizer process do their work."""
