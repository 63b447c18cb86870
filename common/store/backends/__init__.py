"""How bytes reach the drives: direct I/O, kvikio, and drives made to look slower."""
