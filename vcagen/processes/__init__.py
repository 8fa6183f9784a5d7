"""The mathematics between noise and data; torch only."""
