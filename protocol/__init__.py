"""Data that processes exchange (HTTP bodies, engine messages, handshakes, errors), and
modules that every process needs (settings, logs, metrics, child processes).
"""
