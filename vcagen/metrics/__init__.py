"""Scores by the ADM protocol: features, statistics, distances, evaluation."""
