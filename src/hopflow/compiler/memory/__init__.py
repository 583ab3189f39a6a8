"""Where values are: which of them share memory, and what is copied."""
