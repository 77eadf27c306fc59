"""Environments in which trajectories take place, one file each. ``--tool_type NAME`` serves one."""
