"""``python -m verl_tool.replay``."""

from verl_tool.replay.command import main

if __name__ == "__main__":
    main()
