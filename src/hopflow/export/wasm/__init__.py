"""Exported programs as WebAssembly, with JavaScript and TypeScript around it."""
