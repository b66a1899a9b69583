"""Benchmark programs, each with one line of JSON as its last output, and helpers."""
