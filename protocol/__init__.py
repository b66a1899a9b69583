"""Everything that crosses a process boundary: HTTP bodies, engine messages, handshake,
errors.
"""
