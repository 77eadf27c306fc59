"""Invents invoices that the clerk may read, and the result that root alone may read."""

import csv
import random
from pathlib import Path

COLUMNS = ("number", "customer", "cents", "paid")
random.seed(7)
invoices = [
    (number, f"c{random.randrange(40):02}", random.randrange(100, 90_000), random.choice(("yes", "yes", "no")))
    for number in range(900)
]
Path("/srv/books/invoices").mkdir(parents=True)
for month in range(12):
    chosen = invoices[month * 75 : month * 75 + 75] + random.sample(invoices, 12)
    with open(f"/srv/books/invoices/{month + 1:02}.csv", "w", newline="") as file:
        csv.writer(file).writerows([COLUMNS, *chosen])
owed = {}
for _, customer, cents, paid in invoices:
    if paid == "no":
        owed[customer] = owed.get(customer, 0) + cents
Path("/srv/closed").mkdir(mode=0o700)
with open("/srv/closed/owed.csv", "w", newline="") as file:
    csv.writer(file, lineterminator="\n").writerows([("customer", "cents"), *sorted(owed.items())])
