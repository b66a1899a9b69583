"""Benchmarks. Each is a program whose last line of output is JSON."""
