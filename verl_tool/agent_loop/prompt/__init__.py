"""Build the prompts and contexts that the model is fed."""
