"""The decode server: pulls the KV of prompts, checks that each lease held until the
pull ended, and generates.
"""
