"""``python -m verl_tool.replay.branch``."""

from verl_tool.replay.branch.branch_cli import main

if __name__ == "__main__":
    main()
