"""How bytes reach the drives: direct I/O and kvikio."""
