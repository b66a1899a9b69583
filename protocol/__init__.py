"""What processes exchange (HTTP bodies, engine messages, handshakes, errors), and what
all of them need (settings, logs, metrics, child processes).
"""
