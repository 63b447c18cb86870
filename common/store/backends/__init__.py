"""How bytes reach the drives: direct I/O, kvikio, the choice between them, and drives made to look slower."""
