"""Training runs: one loop, and what it drives on one machine out of core.

It also exports the result, which another program loads."""
