"""Batching and stepping: the engine core, its workers and the HTTP process."""
