"""The characters that stand for the tags of the harmony format.

An answer may spell a tag out, and that is text. A tag token therefore becomes half a
surrogate pair, a character that no text contains.
"""

START = "\ud800"
END = "\ud801"
MESSAGE = "\ud802"
CHANNEL = "\ud803"
CONSTRAIN = "\ud804"
ALL_TAGS = START + END + MESSAGE + CHANNEL + CONSTRAIN
