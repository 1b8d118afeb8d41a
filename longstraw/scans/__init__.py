"""Scans: mixing ops whose state has a fixed size. Each takes a span's inputs and the state before it, and returns the
span's output and the state after it."""
