"""What can be typed: every option, declared once, and the commands that are made of them.

It reads command lines and configuration files into checked settings, and imports nothing slow."""
