"""Gets an answer that matches a schema: python structured_output.py [QUESTION].

The server samples only tokens that the schema allows, so every complete answer can be
parsed.
"""

import os
import sys
from typing import Annotated, Literal

from openai import OpenAI
from pydantic import BaseModel, Field


class Book(BaseModel):
    title: Annotated[str, Field(max_length=40)]
    year: Annotated[int, Field(ge=1800, le=2030)]
    genre: Literal["novel", "poetry", "science", "history"]


client = OpenAI(
    base_url=os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1"),
    api_key=os.environ.get("OPENAI_API_KEY", "none"),
)
question = " ".join(sys.argv[1:]) or "Name a famous book, with its year and genre."
answer = client.chat.completions.parse(
    model=client.models.list().data[0].id,
    messages=[{"role": "user", "content": question}],
    response_format=Book,
    max_completion_tokens=200,
    temperature=0,
)
book = answer.choices[0].message.parsed
assert book is not None, answer.choices[0].finish_reason
print(f"{book.title} ({book.genre}, {book.year})")
