"""Chat templates that write the current date, fixed to one day."""

import json
import re
from datetime import date

_CALL = re.compile(r"""strftime_now\(\s*(["'])(.*?)\1\s*\)""")


def dated(template: str | dict[str, str] | None, day: date) -> str | dict[str, str] | None:
    """Return a chat template, or several by name, in which ``strftime_now`` is a text: ``day`` in its format."""

    def fixed(text: str) -> str:
        return _CALL.sub(lambda call: json.dumps(day.strftime(call[2])), text)

    if isinstance(template, dict):
        return {name: fixed(text) for name, text in template.items()}
    return template and fixed(template)
