"""Renders a model's Jinja chat template in a sandbox, as transformers does."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.ext
from jinja2.sandbox import ImmutableSandboxedEnvironment

from protocol.errors import InvalidRequest
from protocol.openai.requests import refuse


class _GenerationTag(jinja2.ext.Extension):
    """Renders the content of `{% generation %}`, a tag that marks text for training."""

    tags = {"generation"}  # noqa: RUF012 (jinja2's own declaration is not a ClassVar)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class BrokenTemplate(ValueError):
    """A model's chat template cannot be read. The message names the file and cause."""


class ChatTemplate:
    """A compiled template. Models' templates are not trusted, so a sandbox runs them.

    Args:
        source: the template's text.
        tool_use: the template for requests with tools; None: this template is used.

    Attributes:
        source: the text of this template, followed by the text of `tool_use`.
        knows_tools: whether the template itself writes the request's tools into the
            prompt.
        is_harmony: whether the template writes gpt-oss's harmony format; see
            engine/text/harmony.py.
    """

    def __init__(self, source: str, tool_use: "ChatTemplate | None" = None) -> None:
        self._template = _environment().from_string(source)
        self._for_tools = tool_use._template if tool_use else self._template
        self.source: str = source + (tool_use.source if tool_use else "")
        self._knows_developer = "developer" in self.source
        self.knows_tools = "tools" in self.source
        self.is_harmony = "<|channel|>" in self.source

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
        """Return the prompt that the template writes for `messages`.

        Null members of messages are left out, except `content`. The role "developer"
        is changed to "system" if the template's text does not contain "developer".

        Args:
            special_tokens: the texts of the model's special tokens by name.
            tools: the tools for the template to describe; None: no tools.
            add_generation_prompt: whether to add the beginning of the assistant's next
                turn, such as a tag with the role.
            continue_final_message: whether to end the prompt within the last message,
                so that the model continues that message.
            variables: variables for the template, from the request.
            field: the name of the request's field with the messages, for errors.
            on_piece: called after each piece of the prompt. It may raise an exception
                to stop the rendering.

        Raises:
            InvalidRequest: the template refuses the messages or fails on them.
        """
        prepared = [self._prepare(message) for message in messages]
        if continue_final_message:
            prepared[-1]["content"] = (prepared[-1].get("content") or "") + _END_MARK
        context = {
            **special_tokens,
            **(variables or {}),
            "messages": prepared,
            "tools": list(tools) if tools else None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        rendering = (self._for_tools if tools else self._template).generate(context)
        pieces: list[str] = []
        while (piece := _next_piece(rendering, field)) is not None:
            pieces.append(piece)
            on_piece()
        text = "".join(pieces)
        if continue_final_message:
            text = _cut_at_end_mark(text, field)
        return text

    def _prepare(self, message: dict[str, Any]) -> dict[str, Any]:
        """Return a copy of a message in the form that templates expect."""
        prepared = {
            key: value
            for key, value in message.items()
            if value is not None or key == "content"
        }
        if "content" in prepared and prepared["content"] is None:
            prepared["content"] = _NULL
        if prepared.get("role") == "developer" and not self._knows_developer:
            prepared["role"] = "system"
        if calls := prepared.get("tool_calls"):
            prepared["tool_calls"] = [_with_dual_arguments(call) for call in calls]
        return prepared


class _NullContent(str):
    """The value that templates get for a null `content` of a message.

    In a template's tests and comparisons, this object behaves like None. A template
    that writes the content without a test writes an empty text instead of "None".
    """

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return other is None or other is self

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = str.__hash__


_NULL = _NullContent()


def _with_nulls(value: Any) -> Any:
    """Return a copy of `value` in which None replaces each `_NULL`, for JSON."""
    if isinstance(value, dict):
        return {key: _with_nulls(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_with_nulls(item) for item in value]
    return None if value is _NULL else value


def _next_piece(rendering: Iterator[str], field: str) -> str | None:
    """Return the next piece of the prompt; None if the prompt is complete.

    Raises:
        InvalidRequest: the template failed.
    """
    try:
        return next(rendering, None)
    # A template may raise any exception. The template or the messages are the cause,
    # not the server.
    except Exception as error:
        raise InvalidRequest(
            f"The model's chat template refuses these messages: {error}", param=field
        ) from None


class _DualArguments(dict[str, Any]):
    """A dict of a call's arguments. It becomes JSON if a template adds it to text."""

    def __add__(self, text: str) -> str:
        return _tojson(self) + text

    def __radd__(self, text: str) -> str:
        return text + _tojson(self)


def _with_dual_arguments(call: dict[str, Any]) -> dict[str, Any]:
    function = call.get("function") or {}
    arguments = function.get("arguments")
    if not isinstance(arguments, dict):
        return call
    return {**call, "function": {**function, "arguments": _DualArguments(arguments)}}


# This mark is appended to the message to be continued, to find the message's end in the
# prompt. If the template strips messages, the prompt lacks the mark's last space.
_END_MARK = "<|baton ends here|> "


def _cut_at_end_mark(text: str, field: str) -> str:
    end = text.rfind(_END_MARK.strip())
    if end < 0:
        refuse(
            field,
            "end with a message that this model cannot continue: its chat template "
            "leaves out the end of the last message; end with a message of the user, "
            "or set `continue_final_message` to false",
        )
    keeps_spaces = text.startswith(_END_MARK, end)
    return text[:end] if keeps_spaces else text[:end].rstrip()


def find_chat_template(
    folder: Path, config: dict[str, Any], chosen: Path | None = None
) -> ChatTemplate | None:
    """Return the chat template of a model; None if the model has none.

    As in transformers, the first of these that has a template is used: the .jinja files
    of the directory, tokenizer_config.json, the processor's chat_template.json.

    Args:
        folder: the model's directory.
        config: the content of tokenizer_config.json.
        chosen: the file of --chat-template, which is used instead of the model's
            templates.

    Raises:
        BrokenTemplate: the template cannot be read.
    """
    names = {
        "tool_use": "additional_chat_templates/tool_use.jinja",
        "default": "chat_template.jinja",
    }
    files = {
        name: folder / file for name, file in names.items() if (folder / file).is_file()
    }
    templates: Any = {"default": chosen} if chosen else files
    path = folder / "tokenizer_config.json"
    try:
        if not templates:
            templates = config.get("chat_template")
        if templates is None:
            processor = folder / "chat_template.json"
            if processor.is_file():
                path = processor
                templates = json.loads(path.read_text("utf-8"))["chat_template"]
        if isinstance(templates, list):
            templates = {item["name"]: item["template"] for item in templates}
        if not isinstance(templates, dict):
            templates = {"default": templates}
        compiled: dict[str, ChatTemplate] = {}
        for name in names:
            text = templates.get(name)
            if isinstance(text, Path):
                path = text
                text = path.read_text("utf-8")
            if isinstance(text, str):
                compiled[name] = ChatTemplate(text, compiled.get("tool_use"))
        return compiled.get("default")
    except jinja2.TemplateSyntaxError as error:
        problem = f"{error.message}, line {error.lineno}"
    except (jinja2.TemplateError, LookupError, TypeError, ValueError) as error:
        problem = f"{type(error).__name__}: {error}"
    except OSError as error:
        raise BrokenTemplate(
            f"the chat template {path} cannot be read: {error.strerror}"
        ) from None
    raise BrokenTemplate(
        f"the chat template in {path} cannot be read: {problem}; correct the file or "
        "choose another with --chat-template"
    )


def _environment() -> ImmutableSandboxedEnvironment:
    """Return a Jinja sandbox with the filters, tests and globals of transformers."""
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
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _strftime_now(form: str) -> str:
    """Formats the current time in UTC.

    Transformers uses the local time. Servers in different time zones would then compute
    different prompts for the same messages, and could not use each other's KV.
    """
    return datetime.now(UTC).strftime(form)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: Any = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    """Return `value` as JSON, without the HTML escapes of Jinja's own filter."""
    return json.dumps(
        _with_nulls(value),
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )
