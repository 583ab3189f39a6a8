"""Exported programs as functions of JAX, and as StableHLO."""
