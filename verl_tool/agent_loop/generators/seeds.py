"""Derive seeds that do not depend on the order of sampling."""

from __future__ import annotations

import hashlib


def seed_of(*parts: object) -> int:
    """Derive a 31-bit seed from `parts`, the same in every process and run."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") >> 1
