"""Host memory: buffers, limits of control groups, what the heap keeps, what a run has taken."""
