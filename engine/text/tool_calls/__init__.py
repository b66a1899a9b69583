"""The formats of tool calls: one class per format, found by name in registry.py."""
