"""What a chat template makes of a conversation, and of an observation in it."""
