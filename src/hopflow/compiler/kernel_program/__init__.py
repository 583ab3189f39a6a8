"""The kernel program: definitions of values by expressions, before any memory."""
