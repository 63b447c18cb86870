"""From settings to a job: what the options name is looked up, opened, and checked against the machine.

All that can be wrong with a run is found here, before anything slow starts."""
