"""Where agent programs run, and where they reach their session."""
