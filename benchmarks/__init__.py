"""Benchmarks. Each is a program that ends with one line of JSON."""
