"""The command ``finetune``: reads options, prepares and trains jobs, draws progress, tables and reports."""

import common

if getattr(common, "PROJECT", None) != "fuyou":
    _found = getattr(common, "__file__", None) or ", ".join(getattr(common, "__path__", ["an unknown place"]))
    raise ImportError(
        f"cli needs the package 'common' that it was installed with, but Python found another 'common' first, "
        f"in {_found}: rename that one, take its folder off the module search path, or run from another folder."
    )
