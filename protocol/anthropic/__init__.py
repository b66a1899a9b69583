"""Anthropic's Messages API: a translation in front of the chat path.

A request becomes a chat request (request.py), and the pieces of a chat's answer become
a message or its events (writer.py). The engine, the proxy and the servers handle
messages and chats in the same way.
"""
