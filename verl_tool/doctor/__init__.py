"""Check a model, its tools and the data before a training. See `verl_tool.doctor.doctor_cli`."""
