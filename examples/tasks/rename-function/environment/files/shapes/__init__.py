"""Areas of shapes."""

from shapes.area import calc
from shapes.totals import calculate_total

__all__ = ["calc", "calculate_total"]
