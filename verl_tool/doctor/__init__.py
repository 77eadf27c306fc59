"""Looks at a model, its tools and the data before a training: see `verl_tool.doctor.doctor_cli`."""
