"""What a test of array programs needs, ours or a user's."""
