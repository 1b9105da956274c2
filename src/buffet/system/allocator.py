"""Freed memory stays with the process.

A backward pass allocates and frees tensors of some megabytes thousands of times. By default glibc hands each
of them back to the system and gets it page by page again, which costs up to a third of the pass. The command
line and the processes it starts keep them; a program that uses buffet as a library may do the same. Nothing
is changed where the C library is another one, or where the user has set its limits (``MALLOC_…``).
"""

from __future__ import annotations

import ctypes
import os
import platform
from functools import cache

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of malloc.h
KEPT_BYTES = 1 << 30
LARGEST_KEPT = 1 << 28


@cache
def keep_freed_memory() -> bool:
    """Ask the allocator, once, to keep up to a gigabyte for reuse; True if it does."""
    if platform.libc_ver()[0] != "glibc" or any(name.startswith("MALLOC_") for name in os.environ):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    return bool(mallopt(M_MMAP_THRESHOLD, LARGEST_KEPT) and mallopt(M_TRIM_THRESHOLD, KEPT_BYTES))
