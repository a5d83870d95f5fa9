"""Command-line interface: arguments in, exit codes out."""
