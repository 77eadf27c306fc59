"""Areas of many shapes."""

from shapes import area


def calculate_total(shapes):
    """Return the sum of the areas."""
    return sum(map(area.calc, shapes))
