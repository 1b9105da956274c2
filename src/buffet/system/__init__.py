"""The machine: devices, threads and processes, memory that is kept, files that are never torn."""
