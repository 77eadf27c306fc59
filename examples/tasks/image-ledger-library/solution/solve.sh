#!/bin/bash
set -e
python3 - <<'PYTHON'
import json
from collections import Counter

from ledger import Ledger

balances = Counter()
with open("book.ldgr", "rb") as file:
    for account, cents in Ledger(file.read()).entries():
        balances[account] += cents
with open("balances.json", "w") as file:
    json.dump(balances, file)
PYTHON
