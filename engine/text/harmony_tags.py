"""The characters that represent the tag tokens of the harmony format.

An answer may contain the spelling of a tag as plain text. To keep this text distinct
from a tag, a lone surrogate represents each tag token. No text contains surrogates.
"""

START = "\ud800"
END = "\ud801"
MESSAGE = "\ud802"
CHANNEL = "\ud803"
CONSTRAIN = "\ud804"
ALL_TAGS = START + END + MESSAGE + CHANNEL + CONSTRAIN
