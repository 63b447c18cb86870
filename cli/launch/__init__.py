"""Starting the processes of several ranks, and ending them together."""
