"""Check in at most half an hour that this machine's GPU, its packages and this project work together.

`scripts/gpu_smoke.sh` runs it from a checkout, offline, with random models of under a million weights that are made on
the spot. See assets/docs/gpu_smoke.md.
"""
