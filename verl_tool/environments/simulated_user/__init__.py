"""Parts of the environment `user`: who answers, and the database that the conversation is about."""
