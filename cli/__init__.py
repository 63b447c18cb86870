"""``finetune``: reads the command line, draws progress, tables and reports. No training logic."""
