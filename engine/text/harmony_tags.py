"""The characters that represent the tag tokens of the harmony format.

An answer may contain a tag's spelling as plain text, which is not a tag. So each tag
token is represented by a lone surrogate, a character that no text contains.
"""

START = "\ud800"
END = "\ud801"
MESSAGE = "\ud802"
CHANNEL = "\ud803"
CONSTRAIN = "\ud804"
ALL_TAGS = START + END + MESSAGE + CHANNEL + CONSTRAIN
