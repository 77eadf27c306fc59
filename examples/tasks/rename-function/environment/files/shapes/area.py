"""The area of one shape."""


def calc(shape):
    """Return the area of a shape, such as {"kind": "circle", "radius": 2}."""
    if shape["kind"] == "group":
        return sum(calc(part) for part in shape["parts"])
    if shape["kind"] == "circle":
        return 355 / 113 * shape["radius"] ** 2
    return shape["width"] * shape["height"]
