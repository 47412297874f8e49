"""Files that an operator names, read whole: regular ones, of bounded size.

Opening a FIFO or a device waits for its other side. A file that has grown, or has holes, would fill
the memory. Both are refused before anything is read.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

FILE_BYTES = 4 << 20
"""Most bytes of a file of options, keys or certificates."""


def read_regular(path: Path | str, most_bytes: int = FILE_BYTES) -> bytes:
    """Return a file's content; an OSError says why it is not read."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY)
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EINVAL, "it is no regular file", str(path))
        with open(fd, "rb", closefd=False) as file:
            data = b"" if found.st_size > most_bytes else file.read(most_bytes + 1)
    finally:
        os.close(fd)
    if max(found.st_size, len(data)) > most_bytes:
        raise OSError(errno.EFBIG, f"it is larger than {most_bytes} bytes", str(path))
    return data
