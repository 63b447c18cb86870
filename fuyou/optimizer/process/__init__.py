"""The optimizer process: both ends of its pipe, and the updates of records."""
