"""Several replicas as one server: which of them there are, and which of them holds which trajectory."""
