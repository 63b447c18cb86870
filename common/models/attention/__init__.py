"""Plan attention's memory, and keep documents of a row apart. Rows longer than the device attend in tiles of keys."""
