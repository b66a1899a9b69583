"""Rewords the errors of llguidance for clients.

llguidance's messages refer to options and code of llguidance, which clients do not
know. So each message is replaced by a message from the table below, or by a general
message.
"""

import logging
import re

logger = logging.getLogger("baton.engine")


class GrammarError(ValueError):
    """A schema, regex, choice or grammar cannot be used. The message is one line."""


TOO_COMPLEX = "it is too complex to enforce; send a simpler one"
_MAX_PATH_CHARS = 80
NO_VALUE = "no value matches it; correct the parts that exclude each other"
_FALLBACK = "it cannot be enforced; send a simpler one"
# Patterns of llguidance's messages, and the messages for clients. The first pattern
# that matches is used. A pattern's groups match details that are useful to clients.
_REWORDED = tuple(
    (re.compile(pattern, re.DOTALL), words)
    for pattern, words in (
        (
            r"look-around, including look-ahead",
            "it has look-ahead or look-behind, which cannot be enforced; leave it out",
        ),
        (
            r"lookarounds not supported yet; Word",
            r"it has a word boundary such as \\b, which cannot be enforced; leave it "
            "out",
        ),
        (
            r"lookarounds not supported yet",
            "it has ^ or $ within an expression, which cannot be enforced; leave it "
            "out",
        ),
        (
            r"backreferences are not supported",
            "it has a backreference, which cannot be enforced; leave it out",
        ),
        (
            r"regex parse error:.*error: ([^\n]+)",
            r"it has a regular expression that is not valid (\1); correct it",
        ),
        (r"invalid regex", "it has a regular expression that is not valid; correct it"),
        (r"unknown name: \"?(\w+)", r"the rule `\1` is not defined; define it"),
        (r"Rule '([^']*)' not found", r"the rule `\1` is not defined; define it"),
        (r"duplicate rule: \"?(\w+)", r"the rule `\1` is defined twice; leave one out"),
        (
            r"circular reference in token \"?(\w+)",
            r"the token `\1` refers to itself; write it as a rule, in lower case",
        ),
        (r"no start rule found", "it has no rule `start`; define it"),
        (r"No 'root' rule found", "it has no rule `root`; define it"),
        (
            r"unknown special token: \"?([^\";]+)",
            r"the model has no special token \1; leave it out",
        ),
        (
            r"[Uu]nknown grammar",
            "it refers to a grammar that it does not contain; refer to a rule instead",
        ),
        (
            r"not disjoint",
            "`patternProperties` has two patterns that the same name may match, which "
            "cannot be enforced; use patterns that exclude each other",
        ),
        (
            r"min/maxProperties only supported",
            "`minProperties` and `maxProperties` can only be enforced where every name "
            "in `properties` is in `required`; leave them out",
        ),
        (r"nsatisfiable|Regex is empty", NO_VALUE),
        (
            r"range end must be >= start",
            "it has a repetition {m,n} with m above n; correct it",
        ),
        (
            r"invalid range order",
            "it has a range of characters in the wrong order; correct it",
        ),
        (
            r"schema too large|stack level|circular|too many|too complex|too big|"
            r"too deeply|limit",
            TOO_COMPLEX,
        ),
        (r"not supported yet", "it has syntax that cannot be enforced; leave it out"),
        # Clients receive only the line number of a syntax error.
        (r"at line (\d+)", r"it has a syntax error in line \1; correct it"),
        (
            r"^(?:at )?(\d+)\((\d+)\):",
            r"it has a syntax error in line \1; correct it",
        ),
    )
)


def reworded(message: str) -> str:
    """Return the message for clients that replaces a message of llguidance."""
    for pattern, words in _REWORDED:
        if match := pattern.search(message):
            return match.expand(words)
    logger.debug(
        "llguidance refused a grammar with a message that has no rewording: %s",
        " ".join(message.split())[:500],
    )
    return _FALLBACK


def located(path: str, problem: str) -> str:
    """Return a message about the schema at `path`; "" is the path of the root."""
    return f"`{shortened(path)}`: {problem}" if path else problem


def shortened(path: str) -> str:
    """Return the last characters of a path, so that the message stays short."""
    return path if len(path) <= _MAX_PATH_CHARS else f"...{path[-_MAX_PATH_CHARS:]}"
