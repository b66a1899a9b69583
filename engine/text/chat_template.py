"""A model's Jinja chat template, rendered in a sandbox exactly as transformers renders it."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.ext
from jinja2.sandbox import ImmutableSandboxedEnvironment

from protocol.errors import InvalidRequest
from protocol.openai.requests import refuse


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's text for training; it renders what it holds."""

    tags = {"generation"}  # noqa: RUF012 (jinja2's own declaration is not a ClassVar)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class BrokenTemplate(ValueError):
    """A model's chat template is none; the message names the file and what is wrong."""


class ChatTemplate:
    """A compiled template. Templates come from the hub, so they are not trusted.

    Args:
        tool_use: takes its place where there are tools.
    """

    def __init__(self, source: str, tool_use: "ChatTemplate | None" = None) -> None:
        self._template = _environment().from_string(source)
        self._for_tools = tool_use._template if tool_use else self._template
        self.source: str = source + (tool_use.source if tool_use else "")
        self._knows_developer = "developer" in self.source
        self.knows_tools = "tools" in self.source
        self.is_harmony = (
            "<|channel|>" in self.source
        )  # gpt-oss: see engine/text/harmony.py

    def render(
        self,
        messages: Sequence[dict[str, Any]],
        special_tokens: dict[str, str],
        *,
        tools: Sequence[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
        field: str = "messages",
        on_piece: Callable[[], None] = lambda: None,
    ) -> str:
        """The text of `messages`. A null `content` stays one, other null members are left out.

        A "developer" message is a "system" one for a template that does not know the role.

        Args:
            add_generation_prompt: the head of the assistant's next turn follows.
            continue_final_message: the text ends within the last message, for it to be continued.
            variables: more of what the template may read.
            field: of the request, with the messages, for errors.
            on_piece: called after each piece of the text; what it raises ends the rendering.

        Raises:
            InvalidRequest: the template refuses the messages or fails on them.
        """
        plain = [
            {
                key: value
                for key, value in message.items()
                if value is not None or key == "content"
            }
            for message in messages
        ]
        for message in plain:
            if "content" in message and message["content"] is None:
                message["content"] = _NULL
        for message in plain:
            if message.get("role") == "developer" and not self._knows_developer:
                message["role"] = "system"
            if calls := message.get("tool_calls"):
                message["tool_calls"] = [_with_text(call) for call in calls]
        if continue_final_message:
            plain[-1]["content"] = (plain[-1].get("content") or "") + _HERE
        given = {
            **special_tokens,
            **(variables or {}),
            "messages": plain,
            "tools": list(tools) if tools else None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        rendering = (self._for_tools if tools else self._template).generate(given)
        pieces: list[str] = []
        while (piece := _next_piece(rendering, field)) is not None:
            pieces.append(piece)
            on_piece()
        text = "".join(pieces)
        return (
            _cut_at_the_end_of_the_last_message(text)
            if continue_final_message
            else text
        )


class _NullContent(str):
    """A null content: none to the tests and comparisons of a template, and an empty text where one
    writes it without a test, which would be the word "None"."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return other is None or other is self

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = str.__hash__


_NULL = _NullContent()


def _with_nulls(value: Any) -> Any:
    """`value` as JSON has it, with null for a null content."""
    if isinstance(value, dict):
        return {key: _with_nulls(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_with_nulls(item) for item in value]
    return None if value is _NULL else value


def _next_piece(rendering: Iterator[str], field: str) -> str | None:
    """The next piece of a text; None at its end. Raises InvalidRequest where the template fails."""
    try:
        return next(rendering, None)
    except (
        Exception
    ) as error:  # a template may fail in any way; none is the server's fault
        raise InvalidRequest(
            f"The model's chat template refuses these messages: {error}", param=field
        ) from None


class _Arguments(dict[str, Any]):
    """Those of a call: some templates look into the object, others add it to a text as its JSON."""

    def __add__(self, text: str) -> str:
        return _tojson(self) + text

    def __radd__(self, text: str) -> str:
        return text + _tojson(self)


def _with_text(call: dict[str, Any]) -> dict[str, Any]:
    function = call.get("function") or {}
    given = function.get("arguments")
    if not isinstance(given, dict):
        return call
    return {**call, "function": {**function, "arguments": _Arguments(given)}}


# Written behind the message to be continued, to find its end in the text. Its last character shows
# whether the template strips its messages.
_HERE = "<|baton ends here|> "


def _cut_at_the_end_of_the_last_message(text: str) -> str:
    found = text.rfind(_HERE.strip())
    if found < 0:
        told = "cannot be done: the model's chat template leaves out the end of the last message"
        refuse("continue_final_message", f"{told}; set it to false")
    keeps_spaces = text.startswith(_HERE, found)
    return text[:found] if keeps_spaces else text[:found].rstrip()


def find_chat_template(
    folder: Path, config: dict[str, Any], given: Path | None = None
) -> ChatTemplate | None:
    """The template that is `given`, else the directory's, as transformers finds it: its .jinja
    files before tokenizer_config.json, and what is only a processor's last.

    Raises:
        BrokenTemplate: it cannot be read.
    """
    names = {
        "tool_use": "additional_chat_templates/tool_use.jinja",
        "default": "chat_template.jinja",
    }
    files = {
        name: file for name, at in names.items() if (file := folder / at).is_file()
    }
    found: Any = {"default": given} if given else files
    path = folder / "tokenizer_config.json"
    try:
        if not found:
            found = config.get("chat_template")
        if found is None and (processor := folder / "chat_template.json").is_file():
            path = processor
            found = json.loads(path.read_text("utf-8"))["chat_template"]
        if isinstance(found, list):
            found = {item["name"]: item["template"] for item in found}
        if not isinstance(found, dict):
            found = {"default": found}
        made: dict[str, ChatTemplate] = {}
        for name in names:
            text = found.get(name)
            if isinstance(text, Path):
                path = text
                text = path.read_text("utf-8")
            if isinstance(text, str):
                made[name] = ChatTemplate(text, made.get("tool_use"))
        return made.get("default")
    except jinja2.TemplateSyntaxError as error:
        told = f"{error.message}, line {error.lineno}"
    except (jinja2.TemplateError, LookupError, TypeError, ValueError) as error:
        told = f"{type(error).__name__}: {error}"
    except OSError as error:
        raise BrokenTemplate(f"chat template {path}: {error.strerror}") from None
    raise BrokenTemplate(
        f"{path} holds a chat template that cannot be read: {told}; correct it"
    )


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_GenerationTag, jinja2.ext.loopcontrols],
    )
    environment.filters["tojson"] = _tojson
    environment.tests["none"] = lambda value: value is None or value is _NULL
    environment.tests["string"] = lambda value: (
        isinstance(value, str) and value is not _NULL
    )
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: Any = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes HTML, which would put other text into the prompt."""
    layout = {"indent": indent, "separators": separators}
    return json.dumps(
        _with_nulls(value), ensure_ascii=ensure_ascii, sort_keys=sort_keys, **layout
    )
