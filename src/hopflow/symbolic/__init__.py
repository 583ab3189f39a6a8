"""Symbolic integers, floats and conditions, with their ranges, facts and guards."""
