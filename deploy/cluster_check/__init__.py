"""`baton doctor URL...`: checks running servers and proxies, and pulls between servers.

facts.py         what each process reports, and whether it can be reached from here
side_channel.py  a handshake with a server's side channel, from here
pulls.py         real requests: a prefill leg on one server, a decode leg on another
findings.py      what is wrong, with cause and fix; does no I/O
report.py        the tables, the JSON, and the order of the checks
"""
