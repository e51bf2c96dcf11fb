"""GGUF: files of llama.cpp, in and out."""
