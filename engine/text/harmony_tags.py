"""The characters that stand for the tag tokens of the harmony format.

An answer may spell a tag out, and then it is text. So a tag token is half of a
surrogate pair here, a character that no text contains.
"""

START = "\ud800"
END = "\ud801"
MESSAGE = "\ud802"
CHANNEL = "\ud803"
CONSTRAIN = "\ud804"
ALL_TAGS = START + END + MESSAGE + CHANNEL + CONSTRAIN
