"""What can be said on the command line and in a configuration file."""
