"""The CPU backend: programs as native functions that Python calls."""
