"""The memory plan: which values of a kernel program share memory, and which are
copied."""
