"""Run the optimizer's process, and talk to it over a pipe. It reads a record's states, updates them, and writes them
back."""
