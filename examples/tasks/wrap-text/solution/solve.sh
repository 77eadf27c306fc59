#!/bin/bash
set -e
cat > wrap.py <<'PYTHON'
import re
import sys


def wrap(words, width):
    lines = []
    for word in words:
        if lines and len(lines[-1]) + 1 + len(word) <= width:
            lines[-1] += " " + word
        else:
            lines.append(word)
    return "\n".join(lines)


paragraphs = [part.split() for part in re.split(r"\n[ \t]*(?:\n[ \t]*)+", sys.stdin.read())]
text = "\n\n".join(wrap(words, int(sys.argv[1])) for words in paragraphs if words)
sys.stdout.write(text + "\n" if text else "")
PYTHON
