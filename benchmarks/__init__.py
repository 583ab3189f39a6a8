"""What hopflow costs, beside its peers and beside hand-written C: `make bench`."""
