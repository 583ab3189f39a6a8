"""Batching: `vmap`, and the batch rules of operators with subgraphs."""
