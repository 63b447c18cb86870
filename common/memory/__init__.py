"""Host memory: buffers, limits of control groups, the heap's free memory, and a meter of what a run takes."""
