"""compiler/schedule."""
