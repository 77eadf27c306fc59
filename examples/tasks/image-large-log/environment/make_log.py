"""Writes the log of a day."""

import random

draw = random.Random(20240611)
PATHS = ["/", "/login", "/cart", "/search", "/static/app.js", "/api/orders", "/api/stock", "/health"]
with open("requests.log", "w") as file:
    for second in range(0, 86_400):
        for _ in range(int(draw.random() * 3)):
            path = PATHS[int(draw.random() ** 2 * len(PATHS))]
            hour = second // 3600
            weak = path == "/api/stock" and hour in (4, 13)
            status = 503 if draw.random() < (0.3 if weak and hour == 13 else 0.12 if weak else 0.02) else 200
            milliseconds = int(10 + 400 * draw.random() ** 3)
            clock = f"{hour:02}:{second // 60 % 60:02}:{second % 60:02}"
            file.write(f"{clock} {status} {milliseconds}ms {path}\n")
