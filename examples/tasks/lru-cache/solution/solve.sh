#!/bin/bash
set -e
python3 - <<'PYTHON'
text = open("cache.py").read()
text = text.replace(
    "            return self.entries[key]\n",
    "            self.entries[key] = value = self.entries.pop(key)\n            return value\n",
)
head, _, rest = text.partition("        if len(self.entries) > self.size:")
_, _, tail = rest.partition("        self.entries[key] = value\n")
body = """        self.entries.pop(key, None)
        self.entries[key] = value
        while len(self.entries) > self.size:
            self.entries.pop(next(iter(self.entries)))
"""
open("cache.py", "w").write(head + body + tail)
PYTHON
