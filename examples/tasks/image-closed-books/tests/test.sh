#!/bin/bash
# As root: the right result is in the image, where the clerk cannot read it.
python3 /tests/check.py
