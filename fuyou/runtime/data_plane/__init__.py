"""Hold all bytes of a run, in buffers and on drives. One short method moves them for each kind of task."""
