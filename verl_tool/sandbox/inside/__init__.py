"""What runs within the isolation: the forkserver and, in a fork of it, the run.

Only the standard library is imported here, and nothing of the project outside this package: the code is bound into
the sandbox alone. `wire` is shared with the pool's side.
"""
