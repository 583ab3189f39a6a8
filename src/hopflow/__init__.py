"""hopflow."""
