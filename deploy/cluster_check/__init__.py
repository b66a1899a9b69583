"""`baton doctor URL...`: checks running servers and proxies, and KV pulls between them.

report.py         runs the checks in order; prints the tables or the JSON
facts.py          reads the report of each process, and checks whether it is reachable
side_channel.py   does a handshake with a server's side channel
pulls.py          sends a prefill leg to one server and a decode leg to another
through_proxy.py  sends requests through a proxy
findings.py       derives the problems, with cause and fix, from all results; no I/O
client.py         the HTTP client of all checks
"""
