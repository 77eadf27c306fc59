"""Stored trajectories in the forms of other projects: ATIF, OpenEnv's TrainingTrace and OpenAI's messages."""
