"""Scores by the ADM protocol, with all they depend on."""
