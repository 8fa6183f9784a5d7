"""The machine: files, processes, signals."""
