"""Several training rows per rollout: cutting a rollout into rows does not change its gradient."""
