"""Where the bytes of a run are, and the tasks that move them between drives, host, device and ranks."""
