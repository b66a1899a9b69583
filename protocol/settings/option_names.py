"""Option names as the reader of a message would write them.

A server, or a group of options, knows an option as `--tp`; on the command line of `baton up` it is
`--prefill.tp`.
"""

import re
from collections.abc import Callable, Collection

# Not the middle of a word, a path or another option: no models--owner--name, no --decode.tp.
_OPTION = re.compile(r"(?<![\w./-])--(no-)?([a-z]\w*(?:-\w+)*)(?![\w-]|\.\w)")


def renamed(text: str, name_of: Callable[[str], str | None]) -> str:
    """`text` with the options in it as `name_of` calls them.

    Args:
        name_of: from an option without dashes before it, such as "block-size", to what is written
            instead of all of it; None: it stays as it is. `--no-x` is `x`, and stays a no.
    """

    def written(match: re.Match[str]) -> str:
        name = name_of(match[2])
        return match[0] if name is None else f"--{match[1] or ''}{name}"

    return _OPTION.sub(written, text)


def of_group(text: str, group: str, names: Collection[str]) -> str:
    """`text` with the options `names` as those of a group: --prefill.tp for --tp."""
    return renamed(text, lambda name: f"{group}.{name}" if name in names else None)
