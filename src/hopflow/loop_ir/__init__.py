"""The Loop IR, and the kernels and regions that operations lower to."""
