"""The proof before a run: streaming a small model of the same family changes nothing."""
