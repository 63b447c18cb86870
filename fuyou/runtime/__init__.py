"""What runs the tasks: lanes, buffers, devices, computation, and what was measured meanwhile."""
