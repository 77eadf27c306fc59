"""Compares the function with a slow one, on texts that are drawn anew each time."""

import calendar
import random
from pathlib import Path

from in_workspace import WorkspaceError, evaluate

draw = random.SystemRandom()
YEARS = ["2024", "2023", "1900", "2000", "0999", "1000", "9999"]
MONTHS = ["01", "02", "11", "12", "00", "13", "1"]
DAYS = ["01", "28", "29", "30", "31", "32", "00", "7"]
BETWEEN = [" ", ", ", "x", "_", "-", ".", ". ", "(", ") ", "1", "-1", "3.", "/", "\n"]


def draw_date():
    separators = draw.choice(["--", "--", "//", "..", "-/"])
    return f"{draw.choice(YEARS)}{separators[0]}{draw.choice(MONTHS)}{separators[1]}{draw.choice(DAYS)}"


inputs = ["", "from 2024/02/29 to 2023/02/29.", "1.2024-02-01", "2024-02-01-3"]
inputs += ["".join(draw_date() + draw.choice(BETWEEN) for _ in range(draw.randint(1, 6))) for _ in range(150)]
inputs += ["".join(draw.choice(BETWEEN) + draw_date() + ", " for _ in range(4)) for _ in range(50)]


def is_word(text, at):
    return 0 <= at < len(text) and (text[at].isalnum() or text[at] == "_")


def is_joined(text, separator, digit):
    inside = min(separator, digit) >= 0 and max(separator, digit) < len(text)
    return inside and text[separator] in "-/." and text[digit].isdigit()


def date_at(text, at):
    part = text[at : at + 10]
    if len(part) < 10 or part[4] not in "-/." or part[4] != part[7]:
        return None
    numbers = part[:4], part[5:7], part[8:]
    if not all(number.isdigit() for number in numbers):
        return None
    year, month, day = map(int, numbers)
    if year < 1000 or not 1 <= month <= 12 or not 1 <= day <= calendar.monthrange(year, month)[1]:
        return None
    if is_word(text, at - 1) or is_word(text, at + 10):
        return None
    if is_joined(text, at - 1, at - 2) or is_joined(text, at + 10, at + 11):
        return None
    return f"{year:04}-{month:02}-{day:02}"


expected = [[date for at in range(len(text)) if (date := date_at(text, at))] for text in inputs]
code = "from dates import find_dates; result = [list(find_dates(text)) for text in given]"
try:
    right = evaluate(code, inputs, seconds=10) == expected
except WorkspaceError as error:
    print(error)
    right = False
Path("/logs/verifier/reward.txt").write_text("1\n" if right else "0\n")
