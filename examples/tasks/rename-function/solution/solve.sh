#!/bin/bash
set -e
sed -i 's/\bcalc\b/compute_area/g' shapes/__init__.py shapes/area.py shapes/totals.py
sed -i 's/import calc as/import compute_area as/' shapes/commands.py
