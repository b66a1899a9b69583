"""Lets the model call a function of this program: python tools.py [QUESTION]."""

import json
import os
import sys

from openai import OpenAI

CITIES = {"Berlin": "8 degrees, rain", "Cairo": "29 degrees, sun"}
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Returns the weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": list(CITIES)}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}

client = OpenAI(
    base_url=os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1"),
    api_key=os.environ.get("OPENAI_API_KEY", "none"),
)
model = client.models.list().data[0].id
question = " ".join(sys.argv[1:]) or "What is the weather in Cairo?"
messages = [{"role": "user", "content": question}]
# "required" makes every model call a tool. With "auto" the model decides.
first = client.chat.completions.create(
    model=model,
    messages=messages,
    tools=[TOOL],
    tool_choice="required",
    max_completion_tokens=200,
    temperature=0,
)
message = first.choices[0].message
messages.append(message.model_dump(exclude_none=True))
for call in message.tool_calls:
    city = json.loads(call.function.arguments)["city"]
    print(f"{call.function.name}({city})")
    messages.append({"role": "tool", "tool_call_id": call.id, "content": CITIES[city]})
second = client.chat.completions.create(
    model=model,
    messages=messages,
    tools=[TOOL],
    tool_choice="none",
    max_completion_tokens=60,
    temperature=0,
)
print(second.choices[0].message.content)
