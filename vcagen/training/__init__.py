"""The loop, and everything that a step or a resume depends on."""
