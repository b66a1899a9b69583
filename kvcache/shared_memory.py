"""Zeroed host memory that another process of the same host and user may map to read it.

It is a memory file without a name. A peer that is told the owner's process id and file descriptor
opens it through /proc; a random token behind the memory proves that it found this very file, in
whatever container either lives. The file is sealed against shrinking, so a mapping stays readable
whatever becomes of the owner, and a page costs memory from its first write on.
"""

import fcntl
import mmap
import os
import secrets
from hmac import compare_digest

TOKEN_BYTES = 16
_NAME = "baton-kv"
_SEALS = 0x0002 | 0x0004  # F_SEAL_SHRINK | F_SEAL_GROW
_ADD_SEALS, _GET_SEALS = 1033, 1034  # of fcntl; Python names them from 3.14 on


class NotMappable(Exception):
    """This peer's memory cannot be opened here; the text says why."""


class SharedMemory:
    """Owns the file for as long as it lives.

    Raises:
        MemoryError: it does not fit.
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.token = secrets.token_bytes(TOKEN_BYTES)
        self.fd = os.memfd_create(_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            size = _file_bytes(nbytes)
            os.ftruncate(self.fd, size)
            fcntl.fcntl(self.fd, _ADD_SEALS, _SEALS)
            self.mapping = mmap.mmap(self.fd, size)
        except (OSError, OverflowError) as error:
            os.close(self.fd)
            raise MemoryError(
                f"a KV pool of {nbytes} bytes does not fit: {error}"
            ) from error
        self.mapping[size - TOKEN_BYTES :] = self.token

    def __del__(self) -> None:
        if hasattr(self, "mapping"):
            os.close(self.fd)  # the mapping has a descriptor of its own


def open_memory(pid: int, fd: int, token: bytes, nbytes: int) -> mmap.mmap:
    """Another process's memory, readable here until it is closed.

    Args:
        pid, fd, token: of the owner's SharedMemory.
        nbytes: how much of it there must be.

    Raises:
        NotMappable: the owner is gone, may not be looked at, or this is not the file it announced.
    """
    path = f"/proc/{pid}/fd/{fd}"
    try:
        if not os.readlink(path).startswith(f"/memfd:{_NAME}"):  # open nothing else
            raise NotMappable("its file is another one")
        opened = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise NotMappable(f"its memory cannot be opened: {error}") from error
    try:
        wanted, size = _file_bytes(nbytes), os.fstat(opened).st_size
        if size != wanted:
            raise NotMappable(
                f"its memory has {size} bytes, not the {wanted} it must have"
            )
        if fcntl.fcntl(opened, _GET_SEALS) & _SEALS != _SEALS:
            raise NotMappable("its memory may still be cut short")
        mapping = mmap.mmap(opened, size, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
    except OSError as error:
        raise NotMappable(f"its memory cannot be mapped: {error}") from error
    finally:
        os.close(opened)
    if not compare_digest(mapping[size - TOKEN_BYTES :], token):
        mapping.close()
        raise NotMappable("its memory is another engine's")
    return mapping


def _file_bytes(nbytes: int) -> int:
    """The memory, then the token in a page of its own."""
    return (-(-nbytes // mmap.PAGESIZE) + 1) * mmap.PAGESIZE
