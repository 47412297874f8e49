"""A network of one's own that has only loopback: what runs in it reaches nobody else."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import socket
import struct
from pathlib import Path

_NEWUSER, _NEWNET = 0x1000_0000, 0x4000_0000
_GET_FLAGS, _SET_FLAGS, _UP = 0x8913, 0x8914, 0x1
_ELSEWHERE = ("192.0.2.1", 9)
"""An address for documentation; nothing is sent there."""


def enter() -> None:
    """Take this process and its children to a network of their own; OSError where it cannot be.

    Only root may, others as root of a name space of users in which they stay who they are.
    """
    user, group = os.geteuid(), os.getegid()
    _unshare(_NEWNET if user == 0 else _NEWUSER | _NEWNET)
    if user != 0:
        about = Path("/proc/self")
        (about / "setgroups").write_text("deny")
        (about / "uid_map").write_text(f"{user} {user} 1")
        (about / "gid_map").write_text(f"{group} {group} 1")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        request = struct.pack("16sH14x", b"lo", 0)
        (flags,) = struct.unpack_from("H", fcntl.ioctl(any_socket, _GET_FLAGS, request), 16)
        fcntl.ioctl(any_socket, _SET_FLAGS, struct.pack("16sH14x", b"lo", flags | _UP))


def is_alone() -> bool:
    """Whether no other machine can be reached from here."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        return any_socket.connect_ex(_ELSEWHERE) == errno.ENETUNREACH


def _unshare(kinds: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(kinds) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
