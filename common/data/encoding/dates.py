"""Chat templates that write the current date, fixed to one day."""

import json
import re
from datetime import date
from typing import TypeVar

Template = TypeVar("Template", str, dict[str, str], None)

_CALL = re.compile(r"""strftime_now\(\s*(["'])(.*?)\1\s*\)""")


def dated(template: Template, day: date) -> Template:
    """Return a chat template, or several by name, in which ``strftime_now`` is a text: ``day`` in its format."""
    if isinstance(template, dict):
        return {name: dated(text, day) for name, text in template.items()}
    return template and _CALL.sub(lambda call: json.dumps(day.strftime(call[2])), template)
