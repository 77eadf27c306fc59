"""Seeds of samplings that do not depend on what else is sampled, or when."""

from __future__ import annotations

import hashlib


def seed_of(*parts: object) -> int:
    """A seed for what `parts` name: the same in every process and run, another for other parts. 31 bits."""
    description = hashlib.blake2b(repr(parts).encode(), digest_size=4).digest()
    return int.from_bytes(description, "big") >> 1
