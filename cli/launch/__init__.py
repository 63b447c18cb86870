"""Starting the ranks of a node and ending them together: the launcher, and the entry point of a rank."""
