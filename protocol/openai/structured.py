"""Structured output: the request fields that determine what the output must match.

The fields are `response_format` of OpenAI's API, `structured_outputs` (formerly
`guided_json` and so on) of vLLM, and the corresponding fields of SGLang and llama.cpp.

This file checks the form of these fields, and that at most one grammar is given.
llguidance decides whether a schema or regex is usable (engine/text/grammar_compile.py).
"""

import json
from collections.abc import Sequence
from functools import cached_property, partial
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Self

from pydantic import Field, model_validator

from protocol import exact_json
from protocol.messages import Grammar
from protocol.openai.requests import ReadFrom, Strict, fault, refuse

MAX_CHOICE_TEXTS = 1024


class GuidedDecoding(NamedTuple):
    """A grammar, and the field of the request that it comes from."""

    grammar: Grammar
    field: str


def _schema_grammar(schema: dict[str, Any] | str) -> Grammar:
    """Returns the grammar for a JSON schema.

    Raises:
        ValueError: The schema is not a JSON object, or has an unpaired surrogate.
    """
    value = exact_json.loads(schema) if isinstance(schema, str) else schema
    if not isinstance(value, dict):
        raise ValueError("the schema is not a JSON object")
    text = exact_json.dumps(value)
    text.encode()  # raises an error for a lone surrogate
    return Grammar("json_schema", text)


_Text = Annotated[str, Field(min_length=1)]
_Choices = Annotated[
    list[str], Field(fail_fast=True, min_length=1, max_length=MAX_CHOICE_TEXTS)
]
JsonSchema = Annotated[
    Grammar | None,
    ReadFrom(dict[str, Any] | str, _schema_grammar),
    Field(description="a JSON schema, as an object or as JSON text"),
]
Regex = Annotated[
    Grammar | None,
    ReadFrom(_Text, partial(Grammar, "regex")),
    Field(description="a regular expression, a string that is not empty"),
]
Choice = Annotated[
    Grammar | None,
    ReadFrom(
        _Choices,
        lambda texts: Grammar("choice", json.dumps(texts, ensure_ascii=False)),
    ),
    Field(description=f"a list of 1 to {MAX_CHOICE_TEXTS} strings"),
]
LarkGrammar = Annotated[
    Grammar | None,
    ReadFrom(_Text, partial(Grammar, "grammar")),
    Field(description="a grammar in Lark or GBNF form, a string"),
]
JsonObject = Annotated[
    Grammar | None,
    ReadFrom(bool, lambda is_on: Grammar("json_object") if is_on else None),
    Field(description="true or false"),
]
FormatType = Annotated[
    Literal["text", "json_object", "json_schema"],
    Field(description='"text", "json_object" or "json_schema"'),
]


class SchemaMembers(Strict):
    """A schema in OpenAI's form. The schema is enforced even if `strict` is false."""

    description: str | None = Field(None, description="a string")
    strict: bool | None = Field(None, description="true or false")
    schema_: Annotated[Grammar | None, ReadFrom(dict[str, Any], _schema_grammar)] = (
        Field(None, alias="schema", description="a JSON schema, an object")
    )


class NamedSchema(SchemaMembers):
    name: str = Field(description="a string")


class ResponseFormat(Strict):
    """The field `response_format`, in OpenAI's form or in llama.cpp's.

    In llama.cpp's form, a `schema` stands next to `"type": "json_object"`.
    """

    type: FormatType
    json_schema: NamedSchema | None = Field(
        None, description="an object with `name` and `schema`"
    )
    schema_: Annotated[Grammar | None, ReadFrom(dict[str, Any], _schema_grammar)] = (
        Field(
            None,
            alias="schema",
            description='a JSON schema, an object; it needs "type": "json_object"',
        )
    )

    @model_validator(mode="after")
    def _check_schema_fits_type(self) -> Self:
        if self.type == "json_schema" and self.json_schema is None:
            raise fault(
                "json_schema",
                "is missing; it must be an object with `name` and `schema`.",
            )
        if self.type != "json_schema" and self.json_schema is not None:
            raise fault("type", "must be json_schema if there is a `json_schema`.")
        if self.type != "json_object" and self.schema_ is not None:
            raise fault("type", "must be json_object if there is a `schema`.")
        return self

    def to_guided_decoding(self, path: str, schema_path: str) -> GuidedDecoding | None:
        """Returns the grammar of this format; None if the format is text.

        Args:
            path: Path of this object in the request, for error messages.
            schema_path: Path of the `json_schema` of this object.
        """
        if self.type == "text":
            return None
        if self.json_schema and self.json_schema.schema_:
            return GuidedDecoding(self.json_schema.schema_, f"{schema_path}.schema")
        if self.schema_:
            return GuidedDecoding(self.schema_, f"{path}.schema")
        return GuidedDecoding(
            Grammar("json_object"), schema_path if self.json_schema else path
        )


class StructuredOutputs(Strict):
    """The field `structured_outputs`: exactly one grammar, of any kind."""

    json_: JsonSchema = Field(None, alias="json")
    regex: Regex = None
    choice: Choice = None
    grammar: LarkGrammar = None
    json_object: JsonObject = None

    @model_validator(mode="after")
    def _check_has_one_grammar(self) -> Self:
        if len(_grammars_of(self)) != 1:
            raise ValueError("not exactly one grammar")
        return self


def _grammars_of(model: Strict, path_prefix: str = "") -> list[GuidedDecoding]:
    """Returns each grammar that a field of `model` holds, with that field's path."""
    grammars: list[GuidedDecoding] = []
    for name, info in type(model).model_fields.items():
        value = getattr(model, name)
        if isinstance(value, Grammar):
            grammars.append(GuidedDecoding(value, path_prefix + (info.alias or name)))
    return grammars


class StructuredFields(Strict):
    """The fields of completions and chats that determine what the output must match."""

    # Paths of the response format and of its JSON schema, for error messages.
    format_paths: ClassVar = ("response_format", "response_format.json_schema")
    response_format: ResponseFormat | None = Field(
        None,
        description='{"type": "text"}, {"type": "json_object"} or '
        '{"type": "json_schema", "json_schema": {"name": "...", "schema": {...}}}',
    )
    structured_outputs: StructuredOutputs | None = Field(
        None,
        description="an object with one of `json`, `regex`, `choice`, `grammar` and "
        "`json_object`",
    )
    guided_json: JsonSchema = None
    guided_regex: Regex = None
    guided_choice: Choice = None
    guided_grammar: LarkGrammar = None
    # Names that SGLang and llama.cpp use for fields with a grammar.
    json_schema: JsonSchema = None
    regex: Regex = None
    ebnf: LarkGrammar = None
    grammar: LarkGrammar = None

    @cached_property
    def guided_decoding(self) -> GuidedDecoding | None:
        """The grammar that the output must match, or None.

        Raises:
            InvalidRequest: Several fields set a grammar.
        """
        grammars: list[GuidedDecoding | None] = []
        if self.response_format:
            grammars.append(self.response_format.to_guided_decoding(*self.format_paths))
        if self.structured_outputs:
            grammars += _grammars_of(self.structured_outputs, "structured_outputs.")
        return only_one([*grammars, *_grammars_of(self)])


def only_one(grammars: Sequence[GuidedDecoding | None]) -> GuidedDecoding | None:
    """Returns the grammar that is not None, or None if there is no grammar.

    Raises:
        InvalidRequest: There are several grammars.
    """
    present = [guided for guided in grammars if guided is not None]
    if len(present) > 1:
        refuse(
            present[1].field,
            f"and `{present[0].field}` both set what the output must match; send only "
            "one of them",
        )
    return present[0] if present else None
