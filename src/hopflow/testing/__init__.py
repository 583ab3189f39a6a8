"""What a test of array programs needs, ours or a user's."""

from hopflow.testing.conformance import check_operator

__all__ = ["check_operator"]
