"""What the kernel isolates a run with: namespaces, system call filter and control groups."""
