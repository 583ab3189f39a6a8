"""From the Loop IR to LLVM IR, and on to code: what all targets of LLVM share."""
