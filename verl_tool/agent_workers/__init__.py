"""The workers that hold the model's weights, and the reward managers."""
