"""The command ``finetune``: reads options, resolves and trains jobs, and reports on them.

What computes is in ``fuyou`` and ``fcdp``; the command only calls them."""

import common

if getattr(common, "PROJECT", None) != "fuyou":
    _found = getattr(common, "__file__", None) or ", ".join(getattr(common, "__path__", ["an unknown place"]))
    raise ImportError(
        f"cli needs the package 'common' that it was installed with, but Python found another 'common' first, "
        f"in {_found}: rename that one, take its folder off the module search path, or run from another folder."
    )
