"""Simulated servers: steps of engines, and the requests that they get."""
