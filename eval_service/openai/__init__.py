"""OpenAI's API: requests in, answers out."""
