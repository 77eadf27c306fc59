"""Games with gymnasium's interface for tests. Standard library only: they run in processes of the host."""

import os
import random
import sys
import time


class Guess:
    """Guess a number below `below`; draws it from the process's global random state, as many games do."""

    def __init__(self, below=10):
        self.below = below

    def reset(self, seed=None):
        self.secret = random.randrange(self.below)
        return f"Guess a number below {self.below}.", {}

    def step(self, action):
        guess = int(action)
        if guess == self.secret:
            return "Right.", 1.0, True, False, {}
        return f"{guess} is wrong.", 0.0, False, False, {}


class Limited:
    """Ends as an action says: ``win`` is an end, ``late`` is the limit's."""

    def reset(self, seed=None):
        return "Win or be late.", {}

    def step(self, action):
        return "Over.", 0.0, "win" in action, "late" in action, {}


class Naughty:
    """Does to its process what an action names."""

    def reset(self, seed=None):
        return f"Process {os.getpid()}.", {}

    def step(self, action):
        word, _, rest = action.partition(" ")
        actions = {"exit": self.exit, "hang": self.hang, "fill": self.fill, "print": self.print, "long": self.long}
        if word not in actions:
            raise KeyError(f"unknown action {word}")
        return actions[word](rest), 0.5, False, False, {}

    def exit(self, status):
        os._exit(int(status))

    def hang(self, _):
        while True:
            time.sleep(1)

    def fill(self, megabytes):
        return f"{len(bytearray(int(megabytes) << 20)) >> 20} MB"

    def print(self, count):
        for _ in range(int(count)):
            print("x" * 1000)
            print("y" * 1000, file=sys.stderr)
        return "printed"

    def long(self, count):
        return "é" * int(count)


class Draws:
    """Ends after three steps and shows a random number each time."""

    def reset(self, seed=None):
        self.left = 3
        return f"{random.random():.6f}", {}

    def step(self, action):
        self.left -= 1
        return f"{random.random():.6f}", 1.0, False, self.left == 0, {}


class Broken:
    def reset(self, seed=None):
        raise RuntimeError("no game today")


class Numbers:
    """Its observations are not text."""

    def reset(self, seed=None):
        return 3, {}


class Sleepy:
    """Does not begin."""

    def reset(self, seed=None):
        time.sleep(1000)
