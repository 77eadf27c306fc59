"""What verl and vLLM need for models that read images. Written for verl 0.9.0 and 0.9.1 and vLLM 0.28.0."""
