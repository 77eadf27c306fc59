"""Wrong answers against a reward manager: ``python -m verl_tool.agent_workers.reward_manager.redteam``."""
