"""From the Loop IR to LLVM IR and to machine code: what all LLVM targets share."""
