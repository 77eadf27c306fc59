"""Reads the ledger's own format."""

import struct
import zlib

_HEADER = struct.Struct(">4sHI")


class Ledger:
    """The entries of a file, as pairs of an account and an amount in cents."""

    def __init__(self, data):
        mark, version, checksum = _HEADER.unpack_from(data)
        if mark != b"LDGR" or version != 2:
            raise ValueError("not a ledger of version 2")
        body = zlib.decompress(data[_HEADER.size :])
        if zlib.crc32(body) != checksum:
            raise ValueError("the checksum differs")
        self._body = body

    def entries(self):
        """Yield (account, cents)."""
        at = 0
        while at < len(self._body):
            length, cents = struct.unpack_from(">Bi", self._body, at)
            yield self._body[at + 5 : at + 5 + length].decode(), cents
            at += 5 + length
