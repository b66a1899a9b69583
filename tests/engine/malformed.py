"""Requests that are malformed, or that two servers might read differently (RFC 9110 and 9112), and
the answers to them: statuses in their order (`200|404`: the proxy has a page there), `-` after one
without a body, `!` where the connection is closed then, perhaps once time is up; and how many
completions a backend is asked for.

`@@@@` becomes a name of the row's own. A row that smuggles would have a backend asked more often.
"""

from collections.abc import Callable
from typing import NamedTuple

from protocol.http.connections import MAX_TARGET_BYTES

BODY = b'{"model":"m","prompt":"@@@@"}'
CHUNKED = b"Transfer-Encoding: chunked"
TARGET = b"/v1/completions"
HOST = b"Host: x"
H2C = (b"Connection: Upgrade, HTTP2-Settings", b"Upgrade: h2c", b"HTTP2-Settings: AAMA")
LENGTH = b"Content-Length: %d" % len(BODY)


MAYBE = -1  # once at most: the connection ends while it is being served


class Row(NamedTuple):
    name: str
    raw: bytes
    expected: str
    asked: int = 0


def lines(*parts: bytes) -> bytes:
    return b"\r\n".join([*parts, b"", b""])


def post(*headers: bytes, body: bytes = BODY, line: bytes = b"POST %s HTTP/1.1" % TARGET) -> bytes:
    """A completion: what frames it is among `headers`."""
    return lines(line, HOST, *headers) + body


def sized(*headers: bytes, line: bytes = b"POST %s HTTP/1.1" % TARGET) -> bytes:
    """A good one, but for these."""
    return post(LENGTH, *headers, line=line)


def get(target: bytes = b"/health", *headers: bytes, version: bytes = b"HTTP/1.1") -> bytes:
    return lines(b"GET %b %b" % (target, version), HOST, *headers)


def chunked(*headers: bytes, size: bytes = b"%x" % len(BODY), end: bytes = b"0\r\n\r\n") -> bytes:
    """One in a chunk, whose size line is `size`."""
    return post(CHUNKED, *headers, body=size + b"\r\n" + BODY + b"\r\n" + end)


def each(
    name: str, make: Callable[[bytes], bytes], expected: str, asked: int, *values: bytes
) -> list[Row]:
    return [Row(f"{name} {value!r}"[:80], make(value), expected, asked) for value in values]


GOOD = sized()
HEALTH = get()
SIZE = b"%x" % len(BODY)
IN_CHUNKS = SIZE + b"\r\n" + BODY + b"\r\n0\r\n\r\n"
HIDDEN = b"0\r\n\r\n" + GOOD  # the end of a body in chunks, and a request for whom that is the end
_BIG = b"x" * 70_000

ROWS = [
    # Lengths.
    Row("a length", GOOD, "200", 1),
    Row("no length", post(body=b""), "400"),
    Row("length 0", post(b"Content-Length: 0", body=b""), "400"),
    Row("no length and a body", post() + b"\r\n\r\n", "!"),
    Row("length twice, alike", sized(LENGTH), "400!"),
    Row("length twice, other", sized(b"Content-Length: 0"), "400!"),
    *each("length", lambda value: post(b"Content-Length: " + value), "400!", 0,
        b"+29", b"-29", b"-0", b"0x1d", b"29, 29", b"29,30", b"29 29", b"2 9", b"29;", b"", b" ",
        b"abc", b"29.0", b"2e1", b"\xd9\xa2\xd9\xa9", b"18446744073709551616", b"\x0b29",
        b"29\x00", b"29\x0b", b"'29'"),
    Row("length with zeros", post(b"Content-Length: 0000000029"), "200", 1),
    Row("length in white space", post(b"Content-Length: \t 29 \t "), "200", 1),
    Row("length without a space", post(b"Content-Length:29"), "200", 1),
    Row("length too large", post(b"Content-Length: 9223372036854775807"), "413!"),
    Row("body longer", post(b"Content-Length: 10"), "!"),
    Row("body shorter", post(b"Content-Length: 100"), "408!"),
    Row("length name with _", post(b"Content_Length: 29"), "!"),
    Row("length name with space", post(b"Content-Length : 29"), "400!"),
    Row("length name with tab", post(b"Content-Length\t: 29"), "400!"),
    Row("length name with NUL", post(b"Content-Length\0: 29"), "400!"),
    Row("length name after space", post(b" Content-Length: 29"), "400!"),
    Row("length after obs-fold", post(b"Content-Length:\r\n 29"), "400!"),
    Row("body on GET", get(b"/health", LENGTH) + BODY, "200"),
    Row("request as body of GET", get(b"/health", b"Content-Length: %d" % len(GOOD)) + GOOD, "200"),
    Row("body on HEAD", HEALTH.replace(b"GET", b"HEAD")[:-2] + LENGTH + b"\r\n\r\n" + BODY, "200-"),
    # Both, and codings.
    Row("chunks", chunked(), "200", 1),
    Row("CL.TE", post(b"Content-Length: %d" % len(HIDDEN), CHUNKED, body=HIDDEN), "400!"),
    Row("TE.CL",
        post(CHUNKED, b"Content-Length: 4", body=SIZE + b"\r\n" + BODY + b"\r\n" + HIDDEN), "400!"),
    Row("CL and TE, alike", chunked(LENGTH), "400!"),
    Row("CL 0 and TE", chunked(b"Content-Length: 0"), "400!"),
    Row("TE and CL 0", post(b"Content-Length: 0", CHUNKED, body=HIDDEN), "400!"),
    *each("TE", lambda value: post(b"Transfer-Encoding: " + value, body=IN_CHUNKS), "400!", 0,
        b"identity", b"gzip", b"gzip, chunked", b"chunked, gzip", b"chunked, chunked",
        b"chunked;q=1", b"chunked, identity", b"identity, chunked", b"xchunked", b"chunkedx",
        b"chunk", b'"chunked"', b"", b"chunked\x00", b"\x0bchunked", b"chunked\x0b",
        b"chunked\x0c", b"chunked,", b",chunked", b"chunked chunked", b"x, chunked",
        b"chunked\xa0", b"c\xc4\xb1hunked"),
    Row("TE cHuNkEd", post(b"tRANSFER-eNCODING: cHuNkEd", body=IN_CHUNKS), "200", 1),
    Row("TE tab", post(b"Transfer-Encoding:\tchunked", body=IN_CHUNKS), "200", 1),
    Row("TE, tab behind", post(b"Transfer-Encoding: chunked\t", body=HIDDEN), "400!"),
    Row("TE twice", chunked(CHUNKED), "400!"),
    Row("TE twice, last identity", chunked(b"Transfer-Encoding: identity"), "400!"),
    Row("TE twice, first identity",
        post(b"Transfer-Encoding: identity", CHUNKED, body=HIDDEN), "400!"),
    Row("TE folded", post(b"Transfer-Encoding:\r\n chunked", body=HIDDEN), "400!"),
    Row("TE name with space", post(b"Transfer-Encoding : chunked", LENGTH), "400!"),
    Row("TE name after tab", post(b"\tTransfer-Encoding: chunked", LENGTH), "400!"),
    Row("TE after bare CR", post(b"X: y\rTransfer-Encoding: chunked", LENGTH), "400!"),
    Row("TE after bare LF", post(b"X: y\nTransfer-Encoding: chunked", LENGTH), "400!"),
    Row("TE with _", sized(b"Transfer_Encoding: chunked"), "200", 1),
    Row("TE in 1.0", chunked().replace(b"HTTP/1.1", b"HTTP/1.0"), "400!"),
    Row("TE on GET", get(b"/health", CHUNKED) + b"0\r\n\r\n", "200"),
    Row("a request in chunks of GET",
        get(b"/health", CHUNKED) + b"%x\r\n" % len(GOOD) + GOOD + b"\r\n0\r\n\r\n", "200"),
    # Chunks.
    *each("chunk size", lambda size: chunked(size=size), "400!", 0,
        b"+1d", b"-1d", b"0x1d", b" 1d", b"\t1d", b"1d\t", b"", b"g", b"1d,", b"1_d", b"1d\x00",
        b"1d\x0b", b"1.", b"10000000000000000001d", b"ffffffffffffffff1d", b"1d 1d", b"1d;\x00",
        b"1d;a=\x01", b"1d;a\rb", b"1d;a\nb", b'1d;a="b\nc"', b'1d;a="b\rc"', b'1d;a="\r\n"',
        b'1d;a="b', b"1d;a b", b"1d;@=1"),
    *each("chunk size", lambda size: chunked(size=size), "200", 1,
        b"1D", b"0001d", b"1d;a", b"1d;a=b", b'1d;a="b;c"', b'1d;a="\\"";b=2', b"1d;a;b",
        b"1d;=", b"1d;a=" + _BIG),
    Row("chunk size and space", chunked(size=b"1d "), "400!"),
    Row("chunk size, bad space", chunked(size=b"1d ;a=b"), "400!"),
    Row("chunk extension, empty", chunked(size=b"1d;"), "400!"),
    Row("chunk extension of 2 MB", chunked(size=b"1d;a=" + 30 * _BIG), "400!"),
    Row("2,000 chunks, long extensions",
        post(CHUNKED, body=2000 * (b"1;a=" + _BIG[:1000] + b"\r\n \r\n") + b"0\r\n\r\n"), "400!"),
    Row("one byte a chunk",
        post(CHUNKED, body=5000 * b"1\r\n \r\n" + b"1d\r\n" + BODY + b"\r\n0\r\n\r\n"), "200", 1),
    Row("chunk longer than its size", chunked(size=b"1c"), "400!"),
    Row("chunk shorter than its size", chunked(size=b"1e"), "400!"),
    Row("chunk size of 2^63", chunked(size=b"8000000000000000"), "408!"),
    Row("chunk ended by LF", post(CHUNKED, body=SIZE + b"\n" + BODY + b"\r\n0\r\n\r\n"), "400!"),
    Row("chunk data ended by LF",
        post(CHUNKED, body=SIZE + b"\r\n" + BODY + b"\n0\r\n\r\n"), "400!"),
    Row("chunk data ended by CR",
        post(CHUNKED, body=SIZE + b"\r\n" + BODY + b"\r0\r\n\r\n"), "400!"),
    Row("last chunk ended by LF", chunked(end=b"0\n\r\n"), "400!"),
    Row("chunks end in LF", chunked(end=b"0\r\n\n"), "400!"),
    Row("chunks without an end", chunked(end=b""), "408!"),
    Row("last chunk 000", chunked(end=b"000\r\n\r\n"), "200", 1),
    Row("last chunk, extension", chunked(end=b"0;a=b\r\n\r\n"), "200", 1),
    Row("a request behind chunks", chunked() + GOOD, "200 200", 2),
    Row("behind chunks, one CRLF more", chunked() + b"\r\n" + GOOD, "200 200", 2),
    # Trailers.
    Row("trailer", chunked(end=b"0\r\nX: y\r\n\r\n"), "200", 1),
    Row("trailer Content-Length", chunked(end=b"0\r\nContent-Length: 50\r\n\r\n") + GOOD, "400!"),
    Row("trailer Transfer-Encoding",
        chunked(end=b"0\r\nTransfer-Encoding: chunked\r\n\r\n") + GOOD, "400!"),
    Row("trailer Host", chunked(end=b"0\r\nHost: y\r\n\r\n"), "200", 1),
    Row("trailer Connection", chunked(end=b"0\r\nConnection: close\r\n\r\n") + GOOD, "200!", 1),
    Row("trailer Upgrade",
        chunked(end=b"0\r\nConnection: upgrade\r\nUpgrade: h2c\r\n\r\n") + GOOD, "200 200", 2),
    Row("trailer Expect", chunked(end=b"0\r\nExpect: 100-continue\r\n\r\n") + GOOD, "200 200", 2),
    Row("trailer x-request-id", chunked(end=b"0\r\nX-Request-Id: trailer\r\n\r\n"), "200", 1),
    Row("trailer folded", chunked(end=b"0\r\nX: y\r\n z\r\n\r\n"), "400!"),
    Row("trailer without colon", chunked(end=b"0\r\nX\r\n\r\n"), "400!"),
    Row("trailer, space before colon", chunked(end=b"0\r\nX : y\r\n\r\n"), "400!"),
    Row("trailer, bare LF", chunked(end=b"0\r\nX: y\n\r\n"), "400!"),
    Row("trailers of 2 MB",
        chunked(end=b"0\r\n" + 30 * (b"X: " + _BIG + b"\r\n") + b"\r\n"), "400!"),
    Row("5,000 trailers", chunked(end=b"0\r\n" + 5000 * b"X: y\r\n" + b"\r\n"), "200", 1),
    # Lines and headers.
    Row("obs-fold", sized(b"X: y\r\n z"), "400!"),
    Row("obs-fold, tab", sized(b"X: y\r\n\tz"), "400!"),
    Row("obs-fold, empty", sized(b"X: y\r\n "), "400!"),
    Row("obs-fold of a Host", lines(b"GET /health HTTP/1.1", b"Host: x\r\n y"), "400!"),
    Row("bare LF everywhere", HEALTH.replace(b"\r\n", b"\n"), "400!"),
    Row("bare LF after the request line", HEALTH.replace(b"HTTP/1.1\r\n", b"HTTP/1.1\n"), "400!"),
    Row("bare LF after a header", HEALTH.replace(b"x\r\n", b"x\n", 1), "400!"),
    Row("bare LF at the end", HEALTH[:-2] + b"\n", "400!"),
    Row("bare CR after the request line", HEALTH.replace(b"HTTP/1.1\r\n", b"HTTP/1.1\r"), "400!"),
    Row("bare CR after a header", sized(b"X: y\rZ: z"), "400!"),
    Row("CR CR LF", HEALTH.replace(b"x\r\n", b"x\r\r\n", 1), "400!"),
    Row("LF CR", HEALTH.replace(b"x\r\n", b"x\n\r", 1), "400!"),
    *each("header", sized, "400!", 0,
        b"X", b": y", b" : y", b"X Y: z", b"X\xff: y", b"X(: y", b'"X": y', b"X@: y",
        b"X\x01: y", b"X\x7f: y", b"X[]: y", b"X{}: y", b"X/: y", b"X: y\0z", b"X: \x01",
        b"X: \x08y", b"X: \x1b[2J", b"X: \x7f", b"X: y\x0b", b"X: y\x0c", b"X\\: y", b"X=: y",
        b"X;: y", b"X?: y"),
    *each("header", sized, "200", 1,
        b"X:", b"X: ", b"X:  y \t ", b"X: a\tb", b"X: \xfc\xff", b"!#$%&'*+-.^_`|~: y", b"X: :y",
        b"X::"),
    # What the proxy passes on.
    *each("passed on", sized, "200", 1,
        b"X-Request-Id: a b\tc", b"X-Request-Id: \xfc\xff", b"X-Request-Id:", b"X-Request-Id: a, b",
        b"X-Request-Id: GET /x HTTP/1.1", b"traceparent: \xc3\xbc\t;", b"tracestate: a=b\t,\xff",
        b"Authorization: Bearer \xff", b"Authorization:", b"X-Request-Id: x" + 4000 * b"y"),
    Row("x-request-id of 5 KB", sized(b"X-Request-Id: " + _BIG[:5000]), "400|200", MAYBE),
    Row("header of 70 KB", sized(b"X: " + _BIG), "200", 1),
    Row("headers of 2 MB", sized(*30 * (b"X: " + _BIG,)), "400!"),
    Row("100 headers", sized(*100 * (b"X: y",)), "200", 1),
    Row("20,000 headers", sized(*20_000 * (b"X: y",)), "400!"),
    # Hosts.
    Row("no Host", lines(b"GET /health HTTP/1.1"), "400"),
    Row("two Hosts", get(b"/health", b"Host: y"), "400"),
    Row("two Hosts, alike", get(b"/health", HOST), "400"),
    Row("two Hosts in 1.0", get(b"/health", HOST, version=b"HTTP/1.0"), "400!"),
    Row("Host in other letters, too", get(b"/health", b"hOsT: y"), "400"),
    *each("Host", lambda value: lines(b"GET /health HTTP/1.1", b"Host: " + value), "400", 0,
        b"u@x", b"x/y", b"x y", b"x, y", b"http://x", b"x?", b"x#", b"x\\y", b"x:a", b"x\xff",
        b"<x>", b"[::1", b"x:80:80"),
    *each("Host", lambda value: lines(b"GET /health HTTP/1.1", b"Host: " + value), "200", 0,
        b"", b"x:80", b"[::1]:8000", b"X.Y", b"x:", b"1.2.3.4", b"a_b", b"%41"),
    Row("two Authorizations", sized(b"Authorization: Bearer a", b"Authorization: Bearer b"), "400"),
    # Targets.
    Row("absolute form", get(b"http://x/health"), "200"),
    Row("absolute form, other host", get(b"http://y/health"), "200"),
    Row("absolute form, port", get(b"http://x:80/health?q"), "200"),
    Row("absolute form, no path", get(b"http://x"), "200|404"),
    Row("absolute form, user", get(b"http://u:p@x/health"), "400"),
    Row("absolute form, query alone", get(b"http://x?q"), "200|404"),
    Row("absolute form, capitals", get(b"HTTP://X/health"), "200"),
    Row("absolute form of a completion",
        sized(line=b"POST http://y%b HTTP/1.1" % TARGET), "200", 1),
    Row("absolute form of another scheme", get(b"ftp://x/health"), "400"),
    Row("absolute form of a file", get(b"file:///health"), "400"),
    Row("absolute form, two Hosts", get(b"http://x/health", b"Host: y"), "400"),
    Row("authority form", get(b"x:80"), "400!"),
    Row("authority form with slashes", get(b"//x/health"), "404"),
    Row("asterisk form of GET", get(b"*"), "400"),
    Row("asterisk form of OPTIONS", get(b"*").replace(b"GET", b"OPTIONS"), "400"),
    Row("OPTIONS", get().replace(b"GET", b"OPTIONS"), "405"),
    Row("fragment", get(b"/health#f"), "400"),
    Row("query", get(b"/health?a=b&c"), "200"),
    Row("no slash", get(b"health"), "400!"),
    Row("backslash", get(b"/health\\"), "404"),
    Row("no target", b"GET HTTP/1.1\r\nHost: x\r\n\r\n", "400!"),
    Row("no target, two spaces", b"GET  HTTP/1.1\r\nHost: x\r\n\r\n", "400!"),
    *each("target", lambda target: get(target), "400!", 0,
        b"/a b", b"/a\tb", b"/a\0b", b"/a\x01b", b"/a\x7fb", b"/\xc3\xbc", b"/a\x0bb", b"/a\rb",
        b"/a\nb"),
    *each("target", lambda target: get(target), "400", 0,
        b"/v1/models/../metrics", b"/v1/models/..%2fmetrics", b"/v1/models/%2e%2e/metrics",
        b"/v1/models/.%2E/metrics", b"/./health", b"/v1/..", b"/v1/models/..%5cmetrics",
        b"/health/."),
    *each("target", lambda target: get(target), "404", 0,
        b"/m%00", b"/m%0d%0aX:%20y", b"/%ff", b"/%zz", b"/%", b"/m..m", b"/..."),
    Row("encoded slash", get(b"/v1%2fmodels"), "200"),
    Row("encoded letter", get(b"/he%61lth"), "200"),
    Row("twice encoded", get(b"/%2568ealth"), "404"),
    # Versions and request lines.
    *each("version", lambda version: get(version=version), "400!", 0,
        b"HTTP/0.9", b"HTTP/1.2", b"HTTP/2.0", b"HTTP/2", b"http/1.1", b"HTTP/1.10",
        b"HTTP/01.1", b"HTTP/1.", b"HTTP/1,1", b"HTTP/ 1.1", b"HTTP/1.1 ", b"HTTP/1.1x",
        b"HTTPS/1.1", b"ICE/1.0", b"HTTP/-1.1", b"HTTP/3.0", b"HTTP 1.1"),
    Row("version RTSP", get(version=b"RTSP/1.0"), "200!"),  # the parser does not tell
    Row("HTTP/0.9", b"GET /health\r\n", "!"),
    Row("HTTP/0.9 with headers", b"GET /health\r\nHost: x\r\n\r\n", "400!"),
    Row("HTTP/0.9, ended by LF", b"GET /health\n", "!"),
    Row("HTTP/2 preface", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", "400!"),
    Row("TLS", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", "400!"),
    Row("HTTP/1.0", get(version=b"HTTP/1.0"), "200!"),
    Row("HTTP/1.0, kept", get(b"/health", b"Connection: keep-alive", version=b"HTTP/1.0"), "200!"),
    Row("HTTP/1.0, no Host", b"GET /health HTTP/1.0\r\n\r\n", "200!"),
    Row("HTTP/1.0, no length", post(body=b"", line=b"POST %s HTTP/1.0" % TARGET), "400!"),
    Row("CRLF before", b"\r\n" + HEALTH, "200"),
    Row("many CRLF before", 50 * b"\r\n" + HEALTH, "200"),
    Row("LF before", b"\n" + HEALTH, "200"),
    Row("CR before", b"\r" + HEALTH, "200"),
    Row("space before", b" " + HEALTH, "400!"),
    Row("tab before", b"\t" + HEALTH, "400!"),
    Row("NUL before", b"\0" + HEALTH, "400!"),
    Row("BOM before", b"\xef\xbb\xbf" + HEALTH, "400!"),
    Row("two spaces", HEALTH.replace(b" ", b"  ", 1), "200"),
    Row("tabs for spaces", HEALTH.replace(b" ", b"\t", 2), "400!"),
    Row("space before the first header", HEALTH.replace(b"Host", b" Host"), "400!"),
    Row("method in small letters", HEALTH.replace(b"GET", b"get"), "400!"),
    Row("unknown method", HEALTH.replace(b"GET", b"BREW"), "400!"),
    Row("method with a space", HEALTH.replace(b"GET", b"GE T"), "400!"),
    Row("method of another protocol", HEALTH.replace(b"GET", b"DESCRIBE"), "400!"),
    Row("method of Icecast", HEALTH.replace(b"GET", b"SOURCE"), "405"),
    Row("TRACE", HEALTH.replace(b"GET", b"TRACE"), "405"),
    Row("CONNECT", HEALTH.replace(b"GET /health", b"CONNECT x:80"), "400!"),
    Row("CONNECT with a path", HEALTH.replace(b"GET", b"CONNECT"), "400!"),
    Row("DELETE", HEALTH.replace(b"GET", b"DELETE"), "405"),
    Row("PATCH a completion", sized().replace(b"POST", b"PATCH"), "405"),
    Row("longest target", get(b"/" + (MAX_TARGET_BYTES - 100) * b"y"), "404"),
    Row("long request line", get(b"/" + _BIG), "414"),
    Row("long query", get(b"/health?" + _BIG), "414"),
    # Expect, Connection, Upgrade.
    Row("Expect", sized(b"Expect: 100-continue"), "100 200", 1),
    Row("Expect, other letters", sized(b"eXPECT: 100-CONTINUE"), "100 200", 1),
    Row("Expect of something else", sized(b"Expect: 200-ok"), "200", 1),
    Row("Expect of two things", sized(b"Expect: 100-continue, x"), "200", 1),
    Row("Expect in 1.0",
        sized(b"Expect: 100-continue", b"Connection: keep-alive").replace(b"HTTP/1.1", b"HTTP/1.0"),
        "200!", 1),
    Row("Expect, body to come", post(LENGTH, b"Expect: 100-continue", body=b""), "100 408!"),
    Row("Expect in 1.0, body to come",
        post(LENGTH, b"Expect: 100-continue", body=b"", line=b"POST %s HTTP/1.0" % TARGET), "408!"),
    Row("Expect without a body", get(b"/health", b"Expect: 100-continue"), "200"),
    Row("Expect and no length", post(b"Expect: 100-continue", body=b""), "100 400"),
    Row("Connection: close", sized(b"Connection: close"), "200!", 1),
    Row("Connection: close, and more", sized(b"Connection: close") + GOOD, "200!", 1),
    Row("Connection: x, Close", sized(b"Connection: x, Close"), "200!", 1),
    Row("Connection: keep-alive, close", sized(b"Connection: keep-alive, close"), "200!", 1),
    Row("Connection twice", sized(b"Connection: keep-alive", b"Connection: close"), "200!", 1),
    Row("Connection: Content-Length", sized(b"Connection: Content-Length"), "200", 1),
    Row("Connection: Transfer-Encoding", chunked(b"Connection: Transfer-Encoding"), "200", 1),
    Row("Connection: Host, Authorization",
        sized(b"Connection: Host, X-Request-Id", b"X-Request-Id: @@@@"), "200", 1),
    Row("Connection: disclosed", sized(b"Connection: disclosed"), "200", 1),
    Row("h2c",
        sized(*H2C), "200", 1),
    Row("h2c, chunked",
        chunked(*H2C), "200", 1),
    Row("h2c and a request ahead",
        sized(b"Connection: Upgrade", b"Upgrade: h2c") + GOOD, "200 200", 2),
    Row("websocket",
        get(b"/health", b"Connection: Upgrade", b"Upgrade: websocket"), "200"),
    Row("Upgrade and close", sized(b"Connection: Upgrade, close", b"Upgrade: h2c"), "200!", 1),
    Row("Upgrade with CL.TE", chunked(b"Connection: Upgrade", b"Upgrade: h2c", LENGTH), "400!"),
    Row("Upgrade with two Hosts", sized(b"Connection: Upgrade", b"Upgrade: h2c", HOST), "400"),
    Row("Upgrade in 1.0",
        get(b"/health", b"Connection: Upgrade", b"Upgrade: h2c", version=b"HTTP/1.0"), "200!"),
    Row("Upgrade without Connection", sized(b"Upgrade: h2c"), "200", 1),
    # Requests ahead.
    Row("two at once", GOOD + GOOD, "200 200", 2),
    Row("GET and POST", HEALTH + GOOD + HEALTH, "200 200 200", 1),
    Row("behind HEAD", HEALTH.replace(b"GET", b"HEAD") + GOOD, "200- 200", 1),
    Row("behind HEAD of an error", get(b"/nowhere").replace(b"GET", b"HEAD") + GOOD, "404- 200", 1),
    Row("behind an unknown path", get(b"/nowhere") + GOOD, "404 200", 1),
    Row("behind bad JSON", post(b"Content-Length: 2", body=b"{]") + GOOD, "400 200", 1),
    Row("behind a bad Host", get(b"/health", HOST) + GOOD, "400 200", 1),
    Row("behind no HTTP", b"? ? ?\r\n\r\n" + GOOD, "400!"),
    Row("no HTTP behind", GOOD + b"? ? ?\r\n\r\n", "!", MAYBE),
    Row("behind CL.TE",
        post(b"Content-Length: %d" % len(HIDDEN), CHUNKED, body=HIDDEN) + GOOD, "400!"),
    Row("half behind", GOOD + GOOD[:-1], "200 408!", 1),
    Row("behind a body too long",
        post(b"Content-Length: 100000", body=b" " * 100_000) + GOOD, "413 200", 1),
    Row("a body too long in chunks",
        post(CHUNKED, body=b"186a0\r\n" + b" " * 100_000 + b"\r\n0\r\n\r\n") + GOOD, "413 200", 1),
    Row("half a head", GOOD[:40], "!"),
    Row("nothing", b"", "!"),
]  # fmt: skip
