"""Hardware that is not there: an accelerator that only takes its time, and drives that are slowed down."""
