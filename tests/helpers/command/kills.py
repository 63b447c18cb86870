"""Ends the command inside one of its calls."""

import os
from collections.abc import Sequence
from typing import Any

from cli.main import main

KILLED = 137


def killed_at(owner: Any, name: str, call: int, words: Sequence[str]) -> int:
    """Run the command in a process that ends when it is about to call a function for the Nth time."""
    child = os.fork()
    if not child:
        function, left = getattr(owner, name), [call]

        def killing(*args: Any, **named: Any) -> Any:
            left[0] -= 1
            if not left[0]:
                os._exit(KILLED)
            return function(*args, **named)

        setattr(owner, name, killing)
        os._exit(main([str(word) for word in words]))
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
