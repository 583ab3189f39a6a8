"""Native code for LLVM."""
