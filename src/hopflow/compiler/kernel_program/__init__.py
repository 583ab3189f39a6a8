"""The kernel program: values in SSA form, defined by expressions, without memory."""
