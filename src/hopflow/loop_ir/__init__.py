"""The Loop IR, and the vocabulary by which operations lower to it."""
