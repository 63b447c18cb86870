"""From parsed options to a job that can begin: what is checked, chosen and opened before anything slow starts."""
