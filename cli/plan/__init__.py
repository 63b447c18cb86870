"""``--plan``: whether a run fits, and how fast it will be."""
