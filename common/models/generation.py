"""The generation configuration of what was trained: generation has to stop at the tokens that end answers."""

from collections.abc import Sequence
from pathlib import Path

from transformers import GenerationConfig, PreTrainedConfig

from common.errors import UserError, on_one_line

FILE = "generation_config.json"


def generation_config_of(config: PreTrainedConfig, directory: Path | None = None) -> GenerationConfig:
    """Return the generation configuration in ``directory`` (that of the checkpoint by default) or, without any, what
    the model's configuration implies.

    Raises:
        UserError: there is a file that cannot be read; what it implies would stop at other tokens.
    """
    source = directory or config.name_or_path
    if not source or not (file := Path(source) / FILE).is_file():
        # A preset's is not that of the working directory
        return GenerationConfig.from_model_config(config)
    try:
        return GenerationConfig.from_pretrained(file.parent, local_files_only=True)
    except Exception as error:  # transformers checks no types
        raise UserError(
            f"{file} is not a generation configuration transformers can read ({on_one_line(error)}): restore it, or "
            "remove it, and generation stops where config.json says."
        ) from error


def stops_of(config: GenerationConfig) -> list[int]:
    """Return the tokens at which generation stops."""
    end = config.eos_token_id
    return [token for token in (end if isinstance(end, list) else [end]) if isinstance(token, int)]


def write_stops(folder: Path, config: GenerationConfig, stops: Sequence[int]) -> None:
    """Write ``config`` into a folder that is moved into place later, with ``stops`` at which generation stops, too."""
    all_stops = list(dict.fromkeys([*stops_of(config), *stops]))
    config.eos_token_id = all_stops if len(all_stops) > 1 else all_stops[0]
    config._from_model_config = False  # else transformers 4 takes the model's configuration in its place
    config.to_json_file(folder / FILE)
