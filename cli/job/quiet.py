"""Keeping libraries from writing between the lines that the command prints."""

from transformers.utils import logging as transformers_logging


def quiet_transformers() -> None:
    """Turn off the hints and progress bars of transformers, which would break the progress line."""
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
