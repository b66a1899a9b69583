"""The field `prediction`: a text that the client expects in the answer.

Its tokens are proposed to the model (engine/speculation/), and do not change the
answer.
"""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from protocol.openai.requests import ReadFrom, Strict


class PredictedText(Strict):
    must_be: ClassVar[str] = 'a part {"type": "text", "text": "..."}'
    reported_whole: ClassVar[bool] = True

    type: Literal["text"]
    text: str


_Parts = Annotated[list[PredictedText], Field(fail_fast=True)]


def _join(content: str | list[PredictedText]) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(part.text for part in content)


class Prediction(Strict):
    """A text that the client expects in the answer."""

    must_be: ClassVar[str] = 'an object {"type": "content", "content": "..."}'

    type: Literal["content"] = Field(description="content")
    # The parts of the content are joined like the parts of a message.
    text: Annotated[str, ReadFrom(str | _Parts, _join)] = Field(
        alias="content", description="a string or a list of text parts"
    )


PredictionField = Annotated[
    Prediction | None,
    Field(description='an object {"type": "content", "content": "..."}'),
]
