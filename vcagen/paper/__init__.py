"""The paper's tables beside our runs."""
