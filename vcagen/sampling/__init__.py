"""Images by index, each exactly once."""
