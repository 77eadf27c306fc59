"""``python -m verl_tool.viewer``."""

from verl_tool.viewer.viewer_cli import main

if __name__ == "__main__":
    main()
