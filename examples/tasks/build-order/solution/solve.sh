#!/bin/bash
set -e
python3 - <<'PYTHON'
import heapq

lines = [line for line in open("modules.txt") if not line.startswith("#")]
needs = {name: set(rest.split()) for name, _, rest in (line.partition(":") for line in lines)}
ready = [name for name, others in needs.items() if not others]
heapq.heapify(ready)
order = []
while ready:
    name = heapq.heappop(ready)
    order.append(name)
    for other, others in needs.items():
        if name in others:
            others.remove(name)
            if not others:
                heapq.heappush(ready, other)
open("order.txt", "w").write("".join(f"{name}\n" for name in order))
PYTHON
