"""Exported programs as object code, with a C header: see `model`."""
