"""`control_flow`: plain Python `if`, `while` and `for` become operators."""
