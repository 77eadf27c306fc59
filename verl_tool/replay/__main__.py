"""``python -m verl_tool.replay``."""

from verl_tool.replay.replay_cli import main

if __name__ == "__main__":
    main()
