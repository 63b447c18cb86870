"""Start the ranks of a node, on torchrun's elastic agent."""
