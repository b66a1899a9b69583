"""An agent with Anthropic's client library: python agent.py [QUESTION].

The model calls functions of this program until it can answer.
"""

import os
import sys

from anthropic import Anthropic, beta_tool

STOCK = {"apples": 12, "pears": 0}


@beta_tool
def count_stock(fruit: str) -> str:
    """Returns how many pieces of a fruit there are.

    Args:
        fruit: apples or pears.
    """
    print(f"count_stock({fruit})")
    return str(STOCK.get(fruit.lower(), "unknown fruit"))


client = Anthropic(
    base_url=os.environ.get("ANTHROPIC_BASE_URL", "http://127.0.0.1:8000"),
    api_key=os.environ.get("ANTHROPIC_API_KEY", "none"),
)
model = client.models.list().data[0].id
question = " ".join(sys.argv[1:]) or "How many apples are there?"
runner = client.beta.messages.tool_runner(
    model=model,
    max_tokens=200,
    max_iterations=5,
    system=[
        {
            "type": "text",
            "text": "You answer questions about the stock of a shop.",
            "cache_control": {"type": "ephemeral"},
        }
    ],
    tools=[count_stock],
    messages=[{"role": "user", "content": question}],
    extra_body={"temperature": 0},
    stream=True,
)
for stream in runner:
    for text in stream.text_stream:
        print(text, end="", flush=True)
    usage = stream.get_final_message().usage
    num_read = usage.cache_read_input_tokens
    num_prompt = num_read + usage.cache_creation_input_tokens + usage.input_tokens
    print(f"\n[{num_prompt} tokens of prompt, {num_read} of them cached]")
