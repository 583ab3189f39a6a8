"""From graphs to the Loop IR: what is fused, what is stored, and where loops stand."""
