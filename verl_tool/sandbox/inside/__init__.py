"""Code that runs inside the isolation: the forkserver and, in its forks, the runs.

It imports only the standard library and this package, because nothing else of the project is mounted in the sandbox.
The pool's side also uses `wire`.
"""
