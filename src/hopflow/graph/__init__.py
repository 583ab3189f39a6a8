"""Graphs: typed programs whose operators may hold graphs."""
