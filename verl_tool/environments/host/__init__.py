"""Text environments of another Python environment, each episode in a process of its own.

`host_client` is our side. The other modules run in the foreign interpreter (Python 3.8 or later, Linux) with the
standard library only: `fork_server` imports the environments' package once and forks a process for each episode, in
which `episode_process` serves what `kinds` makes of the package.
"""
