"""A cache with a limited number of entries."""


class Cache:
    """Forgets the entry whose last use is longest ago; `get` and `put` are uses, `peek` is none."""

    def __init__(self, size):
        self.size = size
        self.entries = {}

    def get(self, key, default=None):
        """Return the value of an entry, or `default`."""
        if key in self.entries:
            return self.entries[key]
        return default

    def peek(self, key, default=None):
        """Return what `get` would, without using the entry."""
        return self.entries.get(key, default)

    def put(self, key, value):
        """Add or replace an entry. A cache of size 0 holds none."""
        if len(self.entries) > self.size:
            self.entries.pop(next(iter(self.entries)))
        self.entries[key] = value

    def keys(self):
        """Return the keys, the one that was used last at the end."""
        return list(self.entries)
