"""The messages of a chat, from which requests and saved files are made."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deploy.chat.endpoint import Answer

# Older messages are dropped, because few models have a context for more.
MAX_MESSAGES = 200


@dataclass
class Conversation:
    """The messages of the user and of the model, without the system prompt.

    Attributes:
        system: the system prompt; if empty, requests have no system message.
        options: further members of each request's body, such as the temperature.
    """

    model: str
    system: str = ""
    options: dict[str, Any] = field(default_factory=dict)
    messages: list[dict[str, str]] = field(default_factory=list)

    def request(self, text: str) -> dict[str, Any]:
        """Return the body of the request for an answer to `text`."""
        messages = [*self.messages[-MAX_MESSAGES:], _message("user", text)]
        if self.system:
            messages.insert(0, _message("system", self.system))
        return {"model": self.model, "messages": messages, **self.options}

    def add(self, text: str, answer: Answer) -> None:
        """Append a message of the user, and the answer, which may be incomplete."""
        self.messages += [
            _message("user", text),
            _message("assistant", answer.content),
        ]
        del self.messages[:-MAX_MESSAGES]

    def reset(self) -> None:
        """Remove all messages. The system prompt stays."""
        self.messages.clear()

    def save(self, path: Path) -> None:
        """Write the conversation to a file: as JSON to *.json, otherwise as Markdown.

        Raises:
            OSError: the file cannot be written.
        """
        messages = list(self.messages)
        if self.system:
            messages.insert(0, _message("system", self.system))
        if path.suffix == ".json":
            document = {"model": self.model, "messages": messages}
            text = json.dumps(document, ensure_ascii=False, indent=2)
        else:
            text = _as_markdown(self.model, messages)
        path.write_text(text + "\n", encoding="utf-8")


def _message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def _as_markdown(model: str, messages: Sequence[dict[str, str]]) -> str:
    sections = [f"# A conversation with {model}"]
    for message in messages:
        sections.append(f"## {message['role'].capitalize()}\n\n{message['content']}")
    return "\n\n".join(sections)
