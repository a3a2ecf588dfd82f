"""The run's shared secret: its checks, the key derived from it, and reading it from a file.

64 hexadecimal digits are used as the key. Any other text is stretched with scrypt, so that each
guess costs an attacker 16 MiB of memory and about 50 ms. The secret's source is chosen in config.py
and launch/command.py; its use is in csrc/transport/handshake_protocol.h.
"""

from __future__ import annotations

import functools
import hashlib
import os
import re
import stat

from pycomm._arguments import refuse
from pycomm.errors import InvalidArgument

MIN_CHARACTERS = 16  # `secrets.token_hex(32)` makes 64
MIN_DISTINCT = 6  # different characters: refuses 16 times "a"
MOST_BYTES = 4096  # of a file
SALT = b"pycomm 1 run key"  # fixed: all ranks must derive the same key from the text alone
MAKE_ONE = 'to make one: python -c "import secrets; print(secrets.token_hex(32))"'


def check(secret: str, source: str) -> None:
    """Raises InvalidArgument, naming `source`, if it is no text or too easy to guess."""
    if not isinstance(secret, str):
        refuse(source, secret, "a text")
    if len(secret) < MIN_CHARACTERS:
        raise InvalidArgument(
            f"{source} has {len(secret)} characters and needs {MIN_CHARACTERS} or more; {MAKE_ONE}"
        )
    if len(set(secret)) < MIN_DISTINCT:
        raise InvalidArgument(
            f"{source} has {len(set(secret))} different characters and needs {MIN_DISTINCT} or "
            f"more; {MAKE_ONE}"
        )


@functools.lru_cache(maxsize=4)
def key_of(secret: str) -> str:
    """The key of a checked text, as 64 hexadecimal digits; a key is returned unchanged.

    Every rank computes it once per process.
    """
    if re.fullmatch(r"[0-9a-fA-F]{64}", secret):
        return secret
    return hashlib.scrypt(
        secret.encode("utf-8", "surrogateescape"), salt=SALT, n=2**14, r=8, p=1, dklen=32
    ).hex()


def read_file(path: str) -> str:
    """The secret in a file that only its owner may read.

    Raises:
        InvalidArgument: the file cannot be read, others may read it, or it holds no valid secret.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise InvalidArgument(f"the secret file {path} cannot be read: {error.strerror}") from None
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode):
        os.close(descriptor)
        raise InvalidArgument(f"the secret file {path} is not a regular file")
    mode = stat.S_IMODE(found.st_mode)
    if mode & 0o077:
        os.close(descriptor)
        raise InvalidArgument(
            f"the secret file {path} has the mode {mode:04o}: group or others can use it; remedy: "
            f"chmod 600 {path}"
        )
    return _read(descriptor, f"the secret file {path}")


def read_descriptor(number: int) -> str:
    """Reads the secret from an open file descriptor up to its end; closes it.

    Raises:
        InvalidArgument: it is not open for reading, or holds no valid secret.
    """
    return _read(number, f"the file descriptor {number}")


def _read(descriptor: int, source: str) -> str:
    try:
        with open(descriptor, "rb") as file:
            content = file.read(MOST_BYTES + 1)
        text = content.decode().strip()
    except OSError as error:
        raise InvalidArgument(f"{source} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise InvalidArgument(f"{source} does not hold UTF-8 text") from None
    if len(content) > MOST_BYTES:
        raise InvalidArgument(f"{source} holds more than {MOST_BYTES} bytes: not a secret")
    check(text, f"the secret in {source}")
    return text
