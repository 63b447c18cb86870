"""Commit, resume, move, verify, and export a run on its drives. A step counts once its manifest is replaced."""
