"""Values that the papers on clusters published, and what our planner says of them."""
