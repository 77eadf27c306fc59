#!/bin/bash
set -e
python3 - <<'PYTHON'
import re
from collections import defaultdict
from datetime import datetime

LINE = re.compile(r"(\S+) sshd\[\d+\]: (Failed|Accepted) password for \S+ from (\S+) ")
failures, suspects = defaultdict(list), set()
for line in open("auth.log"):
    when, what, address = LINE.match(line).groups()
    moment = datetime.fromisoformat(when)
    if what == "Failed":
        failures[address].append(moment)
        last = failures[address][-5:]
        if len(last) == 5 and (last[-1] - last[0]).total_seconds() <= 60:
            suspects.add(address)
    elif address in suspects:
        open("answer.txt", "w").write(address + "\n")
PYTHON
