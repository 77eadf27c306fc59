"""An OpenAI-compatible endpoint that answers with the loop of training, tools included, token for token."""
