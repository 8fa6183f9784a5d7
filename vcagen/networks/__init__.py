"""What is learned: torch modules, their cost, their weights on disk."""
