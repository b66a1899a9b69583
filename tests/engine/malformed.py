"""Malformed requests, and requests that two servers might parse differently.

RFC 9110 and 9112 define what is malformed. Each row has a request, the expected
outcome, and the number of completions that a backend receives.

The outcome lists the statuses of the responses in order. `200|404` allows both, because
only the proxy has a page at this path. `-` marks a response without a body. `!` at the
end means that the connection is then closed, perhaps after a timeout.

`@@@@` is replaced with a name that is unique to the row. If a row smuggled a request, a
backend would receive more completions with this name.
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


MAYBE = -1  # one completion or none, because the connection ends during the request


class Row(NamedTuple):
    name: str
    raw: bytes
    expected: str
    num_completions: int = 0


def join_lines(*parts: bytes) -> bytes:
    return b"\r\n".join([*parts, b"", b""])


def post(
    *headers: bytes, body: bytes = BODY, line: bytes = b"POST %s HTTP/1.1" % TARGET
) -> bytes:
    """Returns a completion request. `headers` must give the length of its body."""
    return join_lines(line, HOST, *headers) + body


def sized(*headers: bytes, line: bytes = b"POST %s HTTP/1.1" % TARGET) -> bytes:
    """Returns a completion request that is well-formed except for the arguments."""
    return post(LENGTH, *headers, line=line)


def get(
    target: bytes = b"/health", *headers: bytes, version: bytes = b"HTTP/1.1"
) -> bytes:
    return join_lines(b"GET %b %b" % (target, version), HOST, *headers)


def chunked(
    *headers: bytes, size: bytes = b"%x" % len(BODY), end: bytes = b"0\r\n\r\n"
) -> bytes:
    """Returns a request with one chunk. `size` is the size line of the chunk."""
    return post(CHUNKED, *headers, body=size + b"\r\n" + BODY + b"\r\n" + end)


def each(
    name: str,
    make: Callable[[bytes], bytes],
    expected: str,
    num_requests: int,
    *values: bytes,
) -> list[Row]:
    """Returns one row for each value, with the request `make(value)`."""
    return [
        Row(f"{name} {value!r}"[:80], make(value), expected, num_requests)
        for value in values
    ]


GOOD = sized()
HEALTH = get()
SIZE = b"%x" % len(BODY)
IN_CHUNKS = SIZE + b"\r\n" + BODY + b"\r\n0\r\n\r\n"
# Ends a chunked body. A server that reads the body as chunks sees a second request.
HIDDEN = b"0\r\n\r\n" + GOOD
_BIG = b"x" * 70_000

ROWS = [
    # Lengths.
    Row("a length", GOOD, "200", 1),
    Row("no length", post(body=b""), "400"),
    Row("length 0", post(b"Content-Length: 0", body=b""), "400"),
    Row("no length and a body", post() + b"\r\n\r\n", "!"),
    *each("length twice", sized, "400!", 0, LENGTH, b"Content-Length: 0"),
    *each("length", lambda value: post(b"Content-Length: " + value), "400!", 0, b"+29",
        b"-29", b"-0", b"0x1d", b"29, 29", b"29,30", b"29 29", b"2 9", b"29;", b"",
        b" ", b"abc", b"29.0", b"2e1", b"\xd9\xa2\xd9\xa9", b"18446744073709551616",
        b"\x0b29", b"29\x00", b"29\x0b", b"'29'"),
    *each("length", lambda value: post(b"Content-Length:" + value), "200", 1,
        b" 0000000029", b" \t 29 \t ", b"29"),
    Row("length too large", post(b"Content-Length: 9223372036854775807"), "413!"),
    Row("body longer", post(b"Content-Length: 10"), "!"),
    Row("body shorter", post(b"Content-Length: 100"), "408!"),
    Row("length name with _", post(b"Content_Length: 29"), "!"),
    *each("length", post, "400!", 0, b"Content-Length : 29",
        b"Content-Length\t: 29", b"Content-Length\0: 29", b" Content-Length: 29",
        b"Content-Length:\r\n 29"),
    Row("body on GET", get(b"/health", LENGTH) + BODY, "200"),
    Row("request as body of GET",
        get(b"/health", b"Content-Length: %d" % len(GOOD)) + GOOD, "200"),
    Row("body on HEAD",
        HEALTH.replace(b"GET", b"HEAD")[:-2] + LENGTH + b"\r\n\r\n" + BODY, "200-"),
    # A length and a transfer coding in one request.
    Row("chunks", chunked(), "200", 1),
    Row("CL.TE", post(b"Content-Length: %d" % len(HIDDEN), CHUNKED, body=HIDDEN),
        "400!"),
    Row("TE.CL",
        post(CHUNKED, b"Content-Length: 4",
            body=SIZE + b"\r\n" + BODY + b"\r\n" + HIDDEN), "400!"),
    *each("chunks and", chunked, "400!", 0, LENGTH, b"Content-Length: 0", CHUNKED,
        b"Transfer-Encoding: identity"),
    Row("TE and CL 0", post(b"Content-Length: 0", CHUNKED, body=HIDDEN), "400!"),
    *each("TE", lambda value: post(b"Transfer-Encoding: " + value, body=IN_CHUNKS),
        "400!", 0, b"identity", b"gzip", b"gzip, chunked", b"chunked, gzip",
        b"chunked, chunked", b"chunked;q=1", b"chunked, identity", b"identity, chunked",
        b"xchunked", b"chunkedx", b"chunk", b'"chunked"', b"", b"chunked\x00",
        b"\x0bchunked", b"chunked\x0b", b"chunked\x0c", b"chunked,", b",chunked",
        b"chunked chunked", b"x, chunked", b"chunked\xa0", b"c\xc4\xb1hunked"),
    *each("TE", lambda line: post(line, body=IN_CHUNKS), "200", 1,
        b"tRANSFER-eNCODING: cHuNkEd", b"Transfer-Encoding:\tchunked"),
    *each("TE", lambda line: post(line, body=HIDDEN), "400!", 0,
        b"Transfer-Encoding: chunked\t", b"Transfer-Encoding:\r\n chunked"),
    Row("TE twice, first identity",
        post(b"Transfer-Encoding: identity", CHUNKED, body=HIDDEN), "400!"),
    *each("TE", lambda line: post(line, LENGTH), "400!", 0,
        b"Transfer-Encoding : chunked", b"\tTransfer-Encoding: chunked",
        b"X: y\rTransfer-Encoding: chunked", b"X: y\nTransfer-Encoding: chunked"),
    Row("TE in 1.0", chunked().replace(b"HTTP/1.1", b"HTTP/1.0"), "400!"),
    Row("TE on GET", get(b"/health", CHUNKED) + b"0\r\n\r\n", "200"),
    Row("a request in chunks of GET",
        get(b"/health", CHUNKED) + b"%x\r\n" % len(GOOD) + GOOD + b"\r\n0\r\n\r\n",
        "200"),
    # Chunks.
    *each("chunk size", lambda size: chunked(size=size), "400!", 0, b"+1d", b"-1d",
        b"0x1d", b" 1d", b"\t1d", b"1d\t", b"", b"g", b"1d,", b"1_d", b"1d\x00",
        b"1d\x0b", b"1.", b"10000000000000000001d", b"ffffffffffffffff1d", b"1d 1d",
        b"1d;\x00", b"1d;a=\x01", b"1d;a\rb", b"1d;a\nb", b'1d;a="b\nc"',
        b'1d;a="b\rc"', b'1d;a="\r\n"', b'1d;a="b', b"1d;a b", b"1d;@=1", b"1d ",
        b"1d ;a=b", b"1d;", b"1c", b"1e"),
    Row("chunk extension of 2 MB", chunked(size=b"1d;a=" + 30 * _BIG), "400!"),
    *each("chunk size", lambda size: chunked(size=size), "200", 1, b"1D", b"0001d",
        b"1d;a", b"1d;a=b", b'1d;a="b;c"', b'1d;a="\\"";b=2', b"1d;a;b", b"1d;=",
        b"1d;a=" + _BIG),
    Row("2,000 chunks, long extensions",
        post(CHUNKED,
            body=2000 * (b"1;a=" + _BIG[:1000] + b"\r\n \r\n") + b"0\r\n\r\n"), "400!"),
    Row("one byte a chunk",
        post(CHUNKED, body=5000 * b"1\r\n \r\n" + b"1d\r\n" + BODY + b"\r\n0\r\n\r\n"),
        "200", 1),
    Row("chunk size of 2^63", chunked(size=b"8000000000000000"), "408!"),
    Row("chunk ended by LF", post(CHUNKED, body=SIZE + b"\n" + BODY + b"\r\n0\r\n\r\n"),
        "400!"),
    *each("chunk data ended by",
        lambda end: chunked(end=b"").removesuffix(b"\r\n") + end + b"0\r\n\r\n", "400!",
        0, b"\n", b"\r"),
    *each("last chunk", lambda end: chunked(end=end), "400!", 0, b"0\n\r\n",
        b"0\r\n\n"),
    Row("chunks without an end", chunked(end=b""), "408!"),
    *each("last chunk", lambda end: chunked(end=end), "200", 1, b"000\r\n\r\n",
        b"0;a=b\r\n\r\n"),
    Row("a request behind chunks", chunked() + GOOD, "200 200", 2),
    Row("behind chunks, one CRLF more", chunked() + b"\r\n" + GOOD, "200 200", 2),
    # Trailers.
    *each("trailer", lambda line: chunked(end=join_lines(b"0", line)), "200", 1,
        b"X: y", b"Host: y", b"X-Request-Id: trailer"),
    *each("trailer", lambda line: chunked(end=join_lines(b"0", line)) + GOOD, "400!", 0,
        b"Content-Length: 50", CHUNKED),
    Row("trailer Connection", chunked(end=b"0\r\nConnection: close\r\n\r\n") + GOOD,
        "200!", 1),
    *each("trailer", lambda line: chunked(end=join_lines(b"0", line)) + GOOD,
        "200 200", 2,
        b"Connection: upgrade\r\nUpgrade: h2c", b"Expect: 100-continue"),
    *each("trailer", lambda line: chunked(end=join_lines(b"0", line)), "400!", 0,
        b"X: y\r\n z", b"X", b"X : y"),
    Row("trailer, bare LF", chunked(end=b"0\r\nX: y\n\r\n"), "400!"),
    Row("trailers of 2 MB",
        chunked(end=b"0\r\n" + 30 * (b"X: " + _BIG + b"\r\n") + b"\r\n"), "400!"),
    Row("5,000 trailers", chunked(end=b"0\r\n" + 5000 * b"X: y\r\n" + b"\r\n"), "200",
        1),
    # Lines and headers.
    *each("X: y", lambda rest: sized(b"X: y" + rest), "400!", 0,
        b"\r\n z", b"\r\n\tz", b"\r\n ", b"\rZ: z"),
    Row("obs-fold of a Host", join_lines(b"GET /health HTTP/1.1", b"Host: x\r\n y"),
        "400!"),
    Row("bare LF everywhere", HEALTH.replace(b"\r\n", b"\n"), "400!"),
    *each("behind the request line",
        lambda end: HEALTH.replace(b"HTTP/1.1\r\n", b"HTTP/1.1" + end), "400!", 0,
        b"\n", b"\r"),
    *each("behind a header", lambda end: HEALTH.replace(b"x\r\n", b"x" + end, 1),
        "400!", 0, b"\n", b"\r\r\n", b"\n\r"),
    Row("bare LF at the end", HEALTH[:-2] + b"\n", "400!"),
    *each("header", sized, "400!", 0, b"X", b": y", b" : y", b"X Y: z", b"X\xff: y",
        b"X(: y", b'"X": y', b"X@: y", b"X\x01: y", b"X\x7f: y", b"X[]: y", b"X{}: y",
        b"X/: y", b"X: y\0z", b"X: \x01", b"X: \x08y", b"X: \x1b[2J", b"X: \x7f",
        b"X: y\x0b", b"X: y\x0c", b"X\\: y", b"X=: y", b"X;: y", b"X?: y"),
    *each("header", sized, "200", 1, b"X:", b"X: ", b"X:  y \t ", b"X: a\tb",
        b"X: \xfc\xff", b"!#$%&'*+-.^_`|~: y", b"X: :y", b"X::", b"Expect: 200-ok",
        b"Expect: 100-continue, x", b"Connection: Content-Length",
        b"Connection: disclosed", b"Upgrade: h2c", b"Transfer_Encoding: chunked"),
    # Headers that the proxy passes on.
    *each("passed on", sized, "200", 1, b"X-Request-Id: a b\tc",
        b"X-Request-Id: \xfc\xff", b"X-Request-Id:", b"X-Request-Id: a, b",
        b"X-Request-Id: GET /x HTTP/1.1", b"traceparent: \xc3\xbc\t;",
        b"tracestate: a=b\t,\xff", b"Authorization: Bearer \xff", b"Authorization:",
        b"X-Request-Id: x" + 4000 * b"y"),
    Row("x-request-id of 5 KB", sized(b"X-Request-Id: " + _BIG[:5000]), "400|200",
        MAYBE),
    Row("header of 70 KB", sized(b"X: " + _BIG), "200", 1),
    Row("headers of 2 MB", sized(*30 * (b"X: " + _BIG,)), "400!"),
    Row("100 headers", sized(*100 * (b"X: y",)), "200", 1),
    Row("20,000 headers", sized(*20_000 * (b"X: y",)), "400!"),
    # Hosts.
    Row("no Host", join_lines(b"GET /health HTTP/1.1"), "400"),
    *each("a Host and", lambda line: get(b"/health", line), "400", 0, b"Host: y", HOST,
        b"hOsT: y"),
    Row("two Hosts in 1.0", get(b"/health", HOST, version=b"HTTP/1.0"), "400!"),
    *each("Host", lambda value: join_lines(b"GET /health HTTP/1.1", b"Host: " + value),
        "400", 0, b"u@x", b"x/y", b"x y", b"x, y", b"http://x", b"x?", b"x#", b"x\\y",
        b"x:a", b"x\xff", b"<x>", b"[::1", b"x:80:80"),
    *each("Host", lambda value: join_lines(b"GET /health HTTP/1.1", b"Host: " + value),
        "200", 0, b"", b"x:80", b"[::1]:8000", b"X.Y", b"x:", b"1.2.3.4", b"a_b",
        b"%41"),
    Row("two Authorizations",
        sized(b"Authorization: Bearer a", b"Authorization: Bearer b"), "400"),
    # Targets.
    *each("target", get, "200", 0, b"http://x/health", b"http://y/health",
        b"http://x:80/health?q", b"HTTP://X/health", b"/health?a=b&c", b"/v1%2fmodels",
        b"/he%61lth"),
    *each("target", get, "200|404", 0, b"http://x", b"http://x?q"),
    Row("absolute form of a completion",
        sized(line=b"POST http://y%b HTTP/1.1" % TARGET), "200", 1),
    Row("absolute form, two Hosts", get(b"http://x/health", b"Host: y"), "400"),
    Row("asterisk form of OPTIONS", get(b"*").replace(b"GET", b"OPTIONS"), "400"),
    *each("method", lambda method: HEALTH.replace(b"GET", method), "405", 0,
        b"SOURCE", b"TRACE", b"DELETE", b"OPTIONS"),
    *each("line", lambda line: join_lines(line, HOST), "400!", 0, b"GET HTTP/1.1",
        b"GET  HTTP/1.1"),
    *each("target", get, "400!", 0, b"/a b", b"/a\tb", b"/a\0b", b"/a\x01b", b"/a\x7fb",
        b"/\xc3\xbc", b"/a\x0bb", b"/a\rb", b"/a\nb", b"x:80", b"health"),
    *each("target", get, "400", 0, b"/v1/models/../metrics", b"/v1/models/..%2fmetrics",
        b"/v1/models/%2e%2e/metrics", b"/v1/models/.%2E/metrics", b"/./health",
        b"/v1/..", b"/v1/models/..%5cmetrics", b"/health/.", b"http://u:p@x/health",
        b"ftp://x/health", b"file:///health", b"*", b"/health#f"),
    *each("target", get, "404", 0, b"/m%00", b"/m%0d%0aX:%20y", b"/%ff", b"/%zz", b"/%",
        b"/m..m", b"/...", b"//x/health", b"/health\\", b"/%2568ealth",
        b"/" + (MAX_TARGET_BYTES - 100) * b"y"),
    # Versions and request lines.
    *each("version", lambda version: get(version=version), "400!", 0,
        b"HTTP/0.9", b"HTTP/1.2", b"HTTP/2.0", b"HTTP/2", b"http/1.1", b"HTTP/1.10",
        b"HTTP/01.1", b"HTTP/1.", b"HTTP/1,1", b"HTTP/ 1.1", b"HTTP/1.1 ", b"HTTP/1.1x",
        b"HTTPS/1.1", b"ICE/1.0", b"HTTP/-1.1", b"HTTP/3.0", b"HTTP 1.1"),
    # The parser does not report the protocol's name, so RTSP is accepted.
    Row("version RTSP", get(version=b"RTSP/1.0"), "200!"),
    *each("HTTP/0.9", lambda end: b"GET /health" + end, "!", 0, b"\r\n", b"\n"),
    Row("HTTP/0.9 with headers", b"GET /health\r\nHost: x\r\n\r\n", "400!"),
    Row("HTTP/2 preface", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", "400!"),
    Row("TLS", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", "400!"),
    Row("HTTP/1.0", get(version=b"HTTP/1.0"), "200!"),
    Row("HTTP/1.0, kept",
        get(b"/health", b"Connection: keep-alive", version=b"HTTP/1.0"), "200!"),
    Row("HTTP/1.0, no Host", b"GET /health HTTP/1.0\r\n\r\n", "200!"),
    Row("HTTP/1.0, no length", post(body=b"", line=b"POST %s HTTP/1.0" % TARGET),
        "400!"),
    *each("before", lambda start: start + HEALTH, "200", 0, b"\r\n", 50 * b"\r\n",
        b"\n", b"\r"),
    *each("before", lambda start: start + HEALTH, "400!", 0, b" ", b"\t", b"\0",
        b"\xef\xbb\xbf"),
    Row("two spaces", HEALTH.replace(b" ", b"  ", 1), "200"),
    Row("tabs for spaces", HEALTH.replace(b" ", b"\t", 2), "400!"),
    Row("space before the first header", HEALTH.replace(b"Host", b" Host"), "400!"),
    *each("method", lambda method: HEALTH.replace(b"GET", method), "400!", 0,
        b"get", b"BREW", b"GE T", b"DESCRIBE", b"CONNECT"),
    Row("CONNECT", HEALTH.replace(b"GET /health", b"CONNECT x:80"), "400!"),
    Row("PATCH a completion", sized().replace(b"POST", b"PATCH"), "405"),
    *each("target", get, "414", 0, b"/" + _BIG, b"/health?" + _BIG),
    # Expect, Connection, Upgrade.
    *each("header", sized, "100 200", 1, b"Expect: 100-continue",
        b"eXPECT: 100-CONTINUE"),
    Row("Expect in 1.0",
        sized(b"Expect: 100-continue", b"Connection: keep-alive")
        .replace(b"HTTP/1.1", b"HTTP/1.0"), "200!", 1),
    Row("Expect, body to come", post(LENGTH, b"Expect: 100-continue", body=b""),
        "100 408!"),
    Row("Expect in 1.0, body to come",
        post(LENGTH, b"Expect: 100-continue", body=b"",
            line=b"POST %s HTTP/1.0" % TARGET), "408!"),
    Row("Expect without a body", get(b"/health", b"Expect: 100-continue"), "200"),
    Row("Expect and no length", post(b"Expect: 100-continue", body=b""), "100 400"),
    *each("header", sized, "200!", 1, b"Connection: close", b"Connection: x, Close",
        b"Connection: keep-alive, close"),
    Row("Connection: close, and more", sized(b"Connection: close") + GOOD, "200!", 1),
    Row("Connection twice", sized(b"Connection: keep-alive", b"Connection: close"),
        "200!", 1),
    Row("Connection: Transfer-Encoding", chunked(b"Connection: Transfer-Encoding"),
        "200", 1),
    Row("Connection: Host, Authorization",
        sized(b"Connection: Host, X-Request-Id", b"X-Request-Id: @@@@"), "200", 1),
    Row("h2c", sized(*H2C), "200", 1),
    Row("h2c, chunked", chunked(*H2C), "200", 1),
    Row("h2c, one ahead", sized(b"Connection: Upgrade", b"Upgrade: h2c") + GOOD,
        "200 200", 2),
    Row("websocket", get(b"/health", b"Connection: Upgrade", b"Upgrade: websocket"),
        "200"),
    Row("Upgrade and close", sized(b"Connection: Upgrade, close", b"Upgrade: h2c"),
        "200!", 1),
    Row("Upgrade with CL.TE", chunked(b"Connection: Upgrade", b"Upgrade: h2c", LENGTH),
        "400!"),
    Row("Upgrade with two Hosts", sized(b"Connection: Upgrade", b"Upgrade: h2c", HOST),
        "400"),
    Row("Upgrade in 1.0",
        get(b"/health", b"Connection: Upgrade", b"Upgrade: h2c", version=b"HTTP/1.0"),
        "200!"),
    # Pipelined requests.
    Row("two at once", GOOD + GOOD, "200 200", 2),
    Row("GET and POST", HEALTH + GOOD + HEALTH, "200 200 200", 1),
    Row("behind HEAD", HEALTH.replace(b"GET", b"HEAD") + GOOD, "200- 200", 1),
    Row("behind HEAD of an error", get(b"/nowhere").replace(b"GET", b"HEAD") + GOOD,
        "404- 200", 1),
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
        post(CHUNKED, body=b"186a0\r\n" + b" " * 100_000 + b"\r\n0\r\n\r\n") + GOOD,
        "413 200", 1),
    Row("half a head", GOOD[:40], "!"),
    Row("nothing", b"", "!"),
]  # fmt: skip
