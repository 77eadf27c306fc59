"""Makes the ledger."""

import random
import struct
import zlib

draw = random.Random(99)
ACCOUNTS = ["rent", "salary", "food", "travel", "books", "gifts"]
body = b""
for _ in range(3000):
    account = ACCOUNTS[int(draw.random() * 6)].encode()
    body += struct.pack(">Bi", len(account), int(draw.random() * 20_001) - 10_000) + account
with open("book.ldgr", "wb") as file:
    file.write(struct.pack(">4sHI", b"LDGR", 2, zlib.crc32(body)) + zlib.compress(body))
