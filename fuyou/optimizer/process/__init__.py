"""The optimizer process: both ends of its pipe, and what it does with the states of each record."""
