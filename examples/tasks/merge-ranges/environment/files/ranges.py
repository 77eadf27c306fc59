"""Closed ranges of whole numbers."""


def merge(ranges):
    """Return the fewest ranges that cover the same whole numbers, as lists [first, last] in ascending order.

    A range whose first number is above its last one is empty. Ranges that touch, such as [1, 3] and [4, 6], become one.
    The argument is not changed.
    """
    merged = []
    for first, last in ranges:
        if merged and first <= merged[-1][1]:
            merged[-1][1] = last
        else:
            merged.append([first, last])
    return merged
