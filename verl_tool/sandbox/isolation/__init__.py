"""Isolation of runs by the kernel: namespaces, a filter of system calls, and control groups."""
