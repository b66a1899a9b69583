"""Streams an answer, token by token: python chat_stream.py [QUESTION]."""

import os
import sys

from openai import OpenAI

client = OpenAI(
    base_url=os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1"),
    api_key=os.environ.get("OPENAI_API_KEY", "none"),
)
model = client.models.list().data[0].id
question = " ".join(sys.argv[1:]) or "Name three rivers."
stream = client.chat.completions.create(
    model=model,
    messages=[{"role": "user", "content": question}],
    max_completion_tokens=100,
    temperature=0,
    stream=True,
    stream_options={"include_usage": True},
)
for chunk in stream:
    if chunk.choices:
        print(chunk.choices[0].delta.content or "", end="", flush=True)
    if chunk.usage:
        print(f"\n[{chunk.usage.completion_tokens} tokens of {model}]")
