"""Sizes that are numbers or symbols."""
