"""One question about speed a file: vcagen bench NAME."""
