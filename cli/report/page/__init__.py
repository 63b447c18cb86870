"""Pages to look at: one self-contained HTML file each, without a server, a network or a library."""
