"""What traced code reads from outside: recorded with its access path, and guarded."""
