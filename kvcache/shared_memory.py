"""Zeroed host memory that other processes of the same host and user may map to read it.

The memory is an anonymous file (memfd). The owner sends its process id and the file
descriptor to a peer, which opens the file through /proc. A random token after the
memory proves that the peer has opened this file: in the peer's container, the process
id may belong to a different process. The file is sealed against shrinking, so that a
mapping stays readable. A mapping stays readable even after the owner has ended. A page
takes memory only after its first write.
"""

import fcntl
import mmap
import os
import secrets
from hmac import compare_digest

TOKEN_BYTES = 16
_NAME = "baton-kv"
_SEALS = 0x0002 | 0x0004  # F_SEAL_SHRINK | F_SEAL_GROW
# The commands F_ADD_SEALS and F_GET_SEALS of fcntl. Python's module fcntl lacks them if
# it was built with old C headers.
_ADD_SEALS = 1033
_GET_SEALS = 1034


class NotMappable(Exception):
    """This process cannot map a peer's memory; str(error) is the reason."""


class SharedMemory:
    """A memory file in the process that owns it. Deleting this object closes the file.

    Attributes:
        token: The random token after the memory.
        fd: The file descriptor, in this process.
        mapping: The memory, then the token in the last bytes.

    Raises:
        MemoryError: The file does not fit into memory.
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
            os.close(self.fd)  # the mapping does not need this descriptor


def open_memory(pid: int, fd: int, token: bytes, nbytes: int) -> mmap.mmap:
    """Maps the memory of another process, readable until the mapping is closed.

    Args:
        pid: Process id of the owner.
        fd, token: Attributes of the owner's SharedMemory.
        nbytes: The size that the memory must have.

    Raises:
        NotMappable: The owner has ended, this process may not open the owner's file, or
            the file has a different token or size.
    """
    path = f"/proc/{pid}/fd/{fd}"
    try:
        if not os.readlink(path).startswith(f"/memfd:{_NAME}"):
            raise NotMappable("the peer's descriptor belongs to another file")
        opened_fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise NotMappable(f"the peer's memory cannot be opened: {error}") from error
    try:
        size = os.fstat(opened_fd).st_size
        expected_size = _file_bytes(nbytes)
        if size != expected_size:
            raise NotMappable(
                f"the peer's memory has {size} bytes, but {expected_size} are expected"
            )
        if fcntl.fcntl(opened_fd, _GET_SEALS) & _SEALS != _SEALS:
            raise NotMappable("the peer's memory is not sealed against shrinking")
        mapping = mmap.mmap(opened_fd, size, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
    except OSError as error:
        raise NotMappable(f"the peer's memory cannot be mapped: {error}") from error
    finally:
        os.close(opened_fd)
    if not compare_digest(mapping[size - TOKEN_BYTES :], token):
        mapping.close()
        raise NotMappable("the peer's descriptor leads to another engine's memory")
    return mapping


def _file_bytes(nbytes: int) -> int:
    """Size of the file in bytes: the memory, then a page that ends with the token."""
    return (-(-nbytes // mmap.PAGESIZE) + 1) * mmap.PAGESIZE
