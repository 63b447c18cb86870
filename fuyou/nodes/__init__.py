"""The engine over a process group: what ranks move between each other, and what they agree on."""
