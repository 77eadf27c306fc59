"""What runs beside the model: the workers that hold its weights, and the reward managers."""
