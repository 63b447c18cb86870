"""What the caller commits with each step."""

import json
from typing import Any

from common.errors import UserError


def checked_user_state(state: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of ``state`` as a resumed run will find it.

    Raises:
        UserError: it is no dictionary, or holds what JSON cannot carry.
    """
    if not isinstance(state, dict):
        raise UserError(f"user_state is a dictionary, not a {type(state).__name__}.")
    try:
        copied = json.loads(json.dumps(state, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise UserError(
            f"user_state cannot be committed: {error}. Keep strings, finite numbers and lists in it."
        ) from error
    if copied != state:
        different = next((key for key in state if copied.get(key) != state[key]), "a key")
        raise UserError(
            f"user_state would come back different ({different!r}): JSON turns tuples into lists and keys into strings."
        )
    return copied
