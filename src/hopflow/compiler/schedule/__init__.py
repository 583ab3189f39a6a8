"""Lowers kernel programs to the Loop IR: fusion, storage and the order of loops."""
