"""The model that is served: its weights, its tokenizer, and the training run that it comes from."""
