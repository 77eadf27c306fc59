"""Commands by the names that users type."""

from shapes.area import calc as area_of
from shapes.totals import calculate_total

COMMANDS = {"calc": area_of, "total": calculate_total}
HELP = "calc: area of one shape; total: area of all"


def run(name, argument):
    """Run a command."""
    return COMMANDS[name](argument)
