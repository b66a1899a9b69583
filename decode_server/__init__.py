"""The decode server: pulls the KV of prompts and generates the answers.

It uses pulled KV only if the KV's lease was valid until the pull had ended.
"""
