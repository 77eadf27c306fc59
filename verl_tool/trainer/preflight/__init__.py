"""What a training would fail at, found before it starts: parallel sizes, batches, packages, CPUs, disk, memory.

`checks.run_preflight` runs all of it; each file holds one kind. Nothing here starts Ray, imports vLLM or touches a GPU,
but `ray_resources`, which waits for what a Ray has free once it is joined.
"""
