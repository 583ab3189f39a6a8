"""The compiler: from graphs to native code."""
