from verl_tool.servers.tools import tool


@tool
async def weather(city: str, days: int = 3) -> str:
    """Forecast for a city.

    Args:
        city: Name of the city.
        days: Days ahead.
    """
    return f"{city}: sun for {days} days"
