"""Programs that leave the process: captured functions as objects and as files."""
