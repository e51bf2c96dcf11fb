"""The live page: what a path holds, and the server that shows it."""
