"""Every option, and how a command line becomes one; imports no torch."""
