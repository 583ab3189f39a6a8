"""Code for CPUs: programs as native functions that Python calls."""
