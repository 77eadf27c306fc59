"""Chromium for trajectories: one process, one browser context a trajectory, and a way out to listed hosts only."""
